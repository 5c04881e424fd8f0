# A Ray node with GPUs: lazytrain without a database. The 8-bit operator is compiled here, for this image's compiler.
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/venv \
 && useradd --create-home --uid 10001 lab
WORKDIR /src
COPY . .
RUN pip install . && install -D deploy/ray/node.sh /opt/lazytrain/node.sh && rm -rf /src/*

USER lab
WORKDIR /home/lab
ENTRYPOINT ["/bin/bash", "/opt/lazytrain/node.sh"]
CMD ["worker"]
