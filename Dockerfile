# qmflask in a container. BASE is any image with Python 3.10 or newer; take your model server's image to have both in one:
#   docker build --build-arg BASE=your-llama-server-image -t qmflask .
# See docs/deployment.md for `docker run`. Not built by the tests.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
# Images of model servers often have Python without venv; root is only needed for that.
USER root
RUN python3 -c 'import ensurepip, venv' 2>/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
COPY pyproject.toml setup.py setup.cfg MANIFEST.in README.md LICENSE /src/
COPY conf /src/conf
COPY qmflask /src/qmflask
RUN python3 -m venv /opt/qmflask && /opt/qmflask/bin/pip install --no-cache-dir /src

FROM ${BASE}
USER root
# The environment refers to the base's own interpreter, which must be there as well.
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*)
COPY --from=build /opt/qmflask /opt/qmflask
RUN useradd --system --create-home --home-dir /var/lib/qmflask --shell /usr/sbin/nologin qmflask \
    && chmod 700 /var/lib/qmflask
ENV PATH=/opt/qmflask/bin:$PATH \
    QMFLASK_STATE=/var/lib/qmflask \
    QMFLASK_LOG=json
USER qmflask
# Models, queue and records; must be a local disk.
VOLUME /var/lib/qmflask
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# exec: gunicorn's master is PID 1, gets the TERM of `docker stop`, and stops the models (give it --stop-timeout 90).
ENTRYPOINT ["qmflask"]
# Without a mounted configuration the demonstration is served. All interfaces of the container: publish it on loopback.
CMD ["serve", "--bind", "0.0.0.0:8080"]
