# Controller and API. Planning measures models on fake tensors, so PyTorch is needed, but no GPU.
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 lab
WORKDIR /src
COPY . .
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch>=2.7,<2.14" \
 && apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && pip install ".[server]" && rm -rf /src/*

USER lab
WORKDIR /home/lab
EXPOSE 8470
ENTRYPOINT ["lazytrain"]
CMD ["serve", "--help"]
