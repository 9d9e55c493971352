# The project in NVIDIA's NeMo container; nothing of its stack is replaced.
FROM nvcr.io/nvidia/nemo:25.04

WORKDIR /workspace

# Data preparation at ten times the speed; without it the HF tokenizer does the same work.
RUN pip install --no-cache-dir gigatoken==0.10.0

COPY . /workspace

CMD ["python", "launch.py", "recipes"]
