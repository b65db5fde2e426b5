# tilewise with its compiled kernels: docker build -t tilewise . && docker run --rm tilewise
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels "/source[plots,onnx]"

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels "tilewise[plots,onnx]" && rm -rf /wheels \
    && useradd --create-home tilewise
USER tilewise
WORKDIR /home/tilewise
ENTRYPOINT ["tilewise"]
CMD ["tour", "--quick"]
