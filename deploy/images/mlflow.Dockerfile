# MLflow's server on Postgres.
FROM python:3.12.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 lab && pip install "mlflow>=3.17,<4" "psycopg2-binary>=2.9"

USER 10001
WORKDIR /home/lab
EXPOSE 5000
ENTRYPOINT ["mlflow", "server"]
