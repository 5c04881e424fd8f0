# Controller and API, and the head of the Ray cluster beside them. Planning measures models on fake tensors: that needs
# PyTorch, but no GPU, so this is its build for CPUs. Nothing is trained here, so the native kernel is not compiled.
FROM python:3.12.12-slim-bookworm AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12.12-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# KubeRay's probes of the head ask with wget.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 lab \
 && install -d -o lab -g lab /tmp/ray
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch>=2.7,<2.14"
COPY --from=build /wheels /wheels
RUN pip install "$(echo /wheels/*.whl)[server]"
COPY --chmod=755 deploy/ray/node.sh /opt/lazytrain/node.sh

USER 10001
WORKDIR /home/lab
EXPOSE 8470
ENTRYPOINT ["lazytrain"]
CMD ["serve", "--help"]
