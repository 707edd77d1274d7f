# The container: `docker build -t kvreuse .`, or with CPU wheels `docker build --build-arg TORCH=cpu -t kvreuse .`
# What changes rarely comes first: after a change of code only one small layer is made and pushed anew.

FROM public.ecr.aws/docker/library/python:3.11-slim-bookworm@sha256:0a310eeecf4e1f5a0743f9a6520c90c88d089c903ca5fd283f501e3a805f5f89 AS base

# Bytecode and the CPU's kernels are made here, because where they run there is no compiler and the file system may be
# read-only. Bytecode is checked against no file times, so that the same files come of the same sources.
FROM base AS code
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY src/kvreuse /opt/kvreuse/kvreuse
COPY LICENSE container/serve container/inference.py /opt/kvreuse/
WORKDIR /opt/kvreuse/kvreuse/engine/native
RUN python3 build.py . \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/kvreuse

FROM base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1
# Every package is checked against its hash. Without the tests and compilers that some bring along.
ARG TORCH=cuda
# With TORCH=cpu: a folder or page with the CPU wheels of torch, unless pip knows one already.
ARG TORCH_CPU_WHEELS=
WORKDIR /opt/venv/lib/python3.11/site-packages
COPY container/torch-${TORCH}.lock /opt/locks/torch.lock
RUN python3 -m venv /opt/venv \
    && if [ "$TORCH" = cpu ]; then set -- ${TORCH_CPU_WHEELS:+--find-links "$TORCH_CPU_WHEELS"}; fi \
    && /opt/venv/bin/pip install --no-compile --no-deps --require-hashes -r /opt/locks/torch.lock "$@" \
    && rm -rf torch/test torch/include torch/bin/*est* torch/bin/protoc* \
    && find sympy networkx -type d -name tests -prune -exec rm -rf {} + \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -x py312_ .
COPY container/requirements.lock container/sbom.py /opt/locks/
RUN /opt/venv/bin/pip install --no-compile --no-deps --no-build-isolation --use-pep517 --require-hashes \
        -r /opt/locks/requirements.lock \
    && /opt/venv/bin/pip check \
    && find numpy scipy -type d -name tests -prune -exec rm -rf {} + \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '^./(torch|triton|sympy|networkx|pip)/' . \
    && python3 /opt/locks/sbom.py /opt/locks/torch.lock /opt/locks/requirements.lock > /opt/sbom.cdx.json
WORKDIR /

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="false" \
      org.opencontainers.image.title="kvreuse" \
      org.opencontainers.image.description="A SageMaker inference container that reuses the KV of shared prompt prefixes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# /tmp is the one folder that is written to: whoever runs it may own nothing else.
ENV HF_HOME=/tmp/huggingface \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/kvreuse \
    XDG_CACHE_HOME=/tmp/cache
EXPOSE 8080
# For local use: SageMaker asks /ping itself.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m CMD ["python3", "-c", "import os, urllib.request as r; \
r.urlopen('http://127.0.0.1:' + os.environ.get('SAGEMAKER_BIND_TO_PORT', os.environ.get('OPTION_PORT', '8080')) + '/ping')"]
ENTRYPOINT ["/opt/kvreuse/serve"]
CMD ["serve"]
COPY --from=code /opt/kvreuse /opt/kvreuse
