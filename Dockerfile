# The package with PyTorch for CPUs and Flower, 2 GB:  docker build -t lightning-fedssl .
# Train with files of the current folder:  docker run --rm -v "$PWD:/home/fedssl/data" lightning-fedssl lightning-fedssl fit --config semifl_digits.yaml
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends openssl && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir uv && \
    uv pip install --system --no-cache --torch-backend cpu --constraint /source/constraints.txt '/source[flower,timm]' && rm -r /source
RUN useradd --create-home --uid 1000 fedssl
USER fedssl
RUN mkdir -p /home/fedssl/data/federation
WORKDIR /home/fedssl/data
