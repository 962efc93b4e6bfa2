# ropewalk with torch for CUDA. Build: make image. Run: docs/how-to/containers-and-clusters.md.
# Python as CI has it. torch's wheels bring the CUDA libraries; the driver is the host's, by the NVIDIA Container Toolkit.
FROM python:3.11-slim-bookworm

# Triton and Inductor, which compile the engine flex, call a C++ compiler when they run.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
COPY full ./full
RUN pip install --no-cache-dir --constraint constraints.txt . './full[ray,lm-eval,tensorboard]'

# Any user id may write to the home folder: docker run --user "$(id -u)" makes files that are yours.
RUN useradd --create-home ropewalk && chmod 1777 /home/ropewalk && mkdir /work && chown ropewalk /work
ENV HOME=/home/ropewalk USER=ropewalk NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER ropewalk
WORKDIR /work
ENTRYPOINT ["ropewalk"]
