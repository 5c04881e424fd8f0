"""The one thing that pyproject.toml cannot say: the optimizer's native kernel, built where there is a C++ compiler.

The library is loaded through ctypes; it is an extension module only so that it is built and installed as one. It uses
nothing of Python, so one wheel serves every version.
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = "jobs/optim/kernel"
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


class BuildKernel(build_ext):
    """Tries with threads (OpenMP), then without; a compiler that takes neither leaves the package without a kernel."""

    def build_extension(self, ext: Extension) -> None:
        try:
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, "-fopenmp"], ["-fopenmp"]
            super().build_extension(ext)
        except CompileError:
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, "-fopenmp-simd"], []
            super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    ext_modules=[
        Extension(
            "lazytrain.jobs.optim._kernel",
            sources=[f"{SOURCES}/kernel.cpp"],
            depends=[f"{SOURCES}/{name}.inl" for name in ("plain", "avx2", "avx512", "wide", "choose")],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
