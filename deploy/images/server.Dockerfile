# Controller and API, and the head of the Ray cluster beside them, without PyTorch (server.txt): what planning has to know
# of models and rows is measured on the nodes that train. Nothing is trained here, so the native kernel is not compiled.
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
COPY deploy/images/server.txt /opt/lazytrain/server.txt
RUN pip install --requirement /opt/lazytrain/server.txt
COPY --from=build /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
COPY --chmod=755 deploy/ray/node.sh /opt/lazytrain/node.sh

USER 10001
WORKDIR /home/lab
EXPOSE 8470
ENTRYPOINT ["lazytrain"]
CMD ["serve", "--help"]
