# The server with torch's CPU build. For a GPU image: docker build --build-arg TORCH_INDEX= .
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Empty: the registry's own build of torch, which carries CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Optional parts that the image has, separated by commas: what traces need.
ARG EXTRAS=otel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/truedraft/bin:${PATH}
WORKDIR /src

# Dependencies first: they change rarely, and a change of the sources then reuses this layer.
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/truedraft \
    && pip install --constraint constraints.txt setuptools \
    && pip install --constraint constraints.txt --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch \
    && python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = [project['optional-dependencies'][name] for name in sys.argv[1].split(',') if name]; print(*project['dependencies'], *sum(extras, []), sep='\n')" \
        "${EXTRAS}" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY server server
COPY scheduler scheduler
COPY specdec specdec
COPY kvcache kvcache
COPY model model
COPY bench bench
# The kernels are compiled here, since the image that runs has no compiler, and lie beside the installation, where no
# volume hides them. This machine need not have the instructions that they use.
RUN pip install --no-deps --no-build-isolation . \
    && TRUEDRAFT_HOME=/opt/truedraft/share/truedraft truedraft build-kernels

FROM python:${PYTHON_VERSION}-slim-bookworm
# The kernels' OpenMP runtime, where torch's wheel brings its own under another name. Any version will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 truedraft \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin truedraft \
    && install --directory --owner=10001 --group=10001 /var/lib/truedraft
COPY --from=build /opt/truedraft /opt/truedraft
# Models of the Hugging Face hub belong into the volume, too.
ENV PATH=/opt/truedraft/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/var/lib/truedraft/huggingface \
    TRUEDRAFT_HOME=/var/lib/truedraft \
    TRUEDRAFT_HOST=0.0.0.0 \
    TRUEDRAFT_PORT=8000
USER 10001:10001
WORKDIR /home/truedraft
# Models: a named volume keeps the converted default model between containers.
VOLUME ["/var/lib/truedraft"]
EXPOSE 8000
# The first start fetches and converts the default model before it is healthy.
# It asks this container, whatever proxy the container has, and over TLS where the server speaks it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; tls = os.environ.get('TRUEDRAFT_SSL_CERTFILE'); r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open('http%s://127.0.0.1:%s/health' % ('s' * bool(tls), os.environ['TRUEDRAFT_PORT']), timeout=4)"]
ENTRYPOINT ["truedraft"]
CMD ["serve"]
