# A Ray node with GPUs: what profiles and trains, without database, solver and API (worker.txt). PyTorch brings its own
# CUDA; the driver comes from the host. The Python is the server's to the last digit, because Ray compares them.
FROM python:3.12.12-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12.12-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# KubeRay's probes ask with wget; the optimizer's kernel uses OpenMP.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 lab \
 && install -d -o lab -g lab /tmp/ray
COPY deploy/images/worker.txt /opt/lazytrain/worker.txt
RUN pip install --requirement /opt/lazytrain/worker.txt
COPY --from=build /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
COPY --chmod=755 deploy/ray/node.sh /opt/lazytrain/node.sh

USER 10001
WORKDIR /home/lab
ENTRYPOINT ["/bin/bash", "/opt/lazytrain/node.sh"]
CMD ["worker"]
