# titan-tts with PyTorch for NVIDIA GPUs; CUDA's libraries come with PyTorch's wheels.
#   docker build -t titan-tts .          or: buildah build ...; without a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   docker run -p 127.0.0.1:8000:8000 titan-tts          the base voice as a page and OpenAI's API, http://127.0.0.1:8000
#   docker run --gpus all --shm-size 16g -v /data:/data titan-tts train 800m --data.path /data/ready/train
FROM debian:bookworm-slim

# Triton and Inductor compile with gcc, g++ and the headers of Python while a run trains.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --uid 10001 --create-home titan
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The largest layers first: a change of the code makes the last one only.
# TORCH_INDEX: another CUDA, such as https://download.pytorch.org/whl/cu126.
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --index-url "$TORCH_INDEX" "torch==$TORCH"

WORKDIR /opt/titan-tts
ARG EXTRAS=speech,serve,pretrained,analysis,fp8,megatron,remote,wandb,nvml
COPY pyproject.toml ./
RUN python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [d for e in sys.argv[1].split(",") for d in p["optional-dependencies"][e] if not d.startswith(p["name"])]; \
print(*p["dependencies"], *extras, sep="\n")' \
    "$EXTRAS" > requirements.txt \
    && pip install --requirement requirements.txt \
    && pip install --no-deps resemblyzer==0.1.4
COPY README.md LICENSE ./
COPY titan_tts titan_tts
COPY torchtitan torchtitan
COPY train_configs train_configs
COPY assets/voices assets/voices
RUN pip install --no-deps . && titan-tts --version

USER 10001:10001
WORKDIR /home/titan
EXPOSE 8000
ENTRYPOINT ["titan-tts"]
CMD ["serve", "--host", "0.0.0.0"]
