# coder-plugin on CPUs:
#   docker build -t coder-plugin .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" coder-plugin train
# The current folder is mounted: data are read from it and runs are written to its logs/. With --workers add --shm-size 2g.
FROM python:3.12-slim AS build
RUN pip install --no-cache-dir "uv>=0.9,<1"
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv
RUN uv venv /opt/venv
WORKDIR /src
# The dependencies are a layer of their own, which a change of the code does not build anew.
COPY pyproject.toml ./
RUN uv pip install --torch-backend=cpu -r pyproject.toml
COPY README.md LICENSE ./
COPY integrations integrations
COPY coder_plugin coder_plugin
RUN uv pip install --no-deps .

FROM python:3.12-slim
RUN useradd --create-home --uid 1000 coder && install -d -o 1000 /work
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/work/.cache/huggingface
USER 1000
WORKDIR /work
ENTRYPOINT ["coder-plugin"]
CMD ["--help"]
