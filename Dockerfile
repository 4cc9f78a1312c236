# moatlab as a small image that runs as an ordinary user:
#   docker build --tag moatlab .
#   docker run --rm --gpus all --volume "$PWD/runs:/home/moat/runs" moatlab train moat:2
#
# On x86-64 the default index has the CUDA build of PyTorch. For a much smaller image without CUDA, give the address of
# PyTorch's index of CPU builds (see the install page of pytorch.org):
#   docker build --tag moatlab:cpu --build-arg TORCH_INDEX=ADDRESS .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=""
ARG EXTRAS=hub
RUN useradd --create-home --uid 1000 moat && install --directory --owner=moat --group=moat /home/moat/runs
COPY constraints.txt /tmp/
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/wheels/*.whl)[${EXTRAS}]" \
    && rm -r /tmp/wheels /tmp/constraints.txt
USER 1000
WORKDIR /home/moat
ENTRYPOINT ["moat"]
CMD ["--help"]
