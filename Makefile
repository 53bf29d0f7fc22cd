# The contributor's index. Everything happens in .venv of this folder; paths are relative, so any folder will do.
#
#   make run     serve the demonstration on 127.0.0.1:8080
#   make test    lint, types and all tests (installs what they need)
#   make bench   measure the overhead against a model server used directly; FULL=1 takes longer and spreads less,
#                PEER=http://127.0.0.1:PORT asks another proxy the same (docs/performance.md)
#   make soak    a long random run with crashes; MINUTES=10
#   make storms  TIMES=20 such runs of one minute each, every one with a service of its own
#   make lint    ruff and mypy only

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?=
MINUTES ?= 10
TIMES ?= 20

# Debian packages by the command, library or file that shows they are there.
TEST_PACKAGES := gcc:gcc /usr/include/stdio.h:libc6-dev nginx:nginx uwsgi:uwsgi-core \
	/usr/lib/uwsgi/plugins/python3_plugin.so:uwsgi-plugin-python3 \
	/usr/lib/apache2/modules/mod_wsgi.so:libapache2-mod-wsgi-py3 libgomp.so.1:libgomp1 chromium:chromium
BENCH_PACKAGES := gcc:gcc wrk:wrk

.DELETE_ON_ERROR:
.PHONY: run test bench soak storms lint clean

# An environment whose Python has gone (an upgrade, a half-finished first run) is made anew.
$(shell test -x $(PY) || rm -rf $(VENV))

run: $(VENV)/for-run
	@echo "Serving on http://127.0.0.1:$${PORT:-8080} (Ctrl-C stops it and its models). In another terminal:"
	@echo "  curl http://127.0.0.1:$${PORT:-8080}/v1/models"
	@exec $(PY) -m gunicorn wsgi:app

test: $(VENV)/for-test
	@.ci/packages $(TEST_PACKAGES)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	@# What fails beside others on a busy machine is run once more by itself; what fails then has failed.
	$(PY) -m pytest --numprocesses 3 --dist worksteal $(PYTEST_ARGS) || { test $$? -eq 1 \
	  && echo "--- some tests failed, see above; those alone, once more:" \
	  && $(PY) -m pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }

lint: $(VENV)/for-test
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

bench: $(VENV)/for-test
	@.ci/packages $(BENCH_PACKAGES)
	$(PY) -m bench $(if $(FULL),,--quick) $(if $(PEER),--peer $(PEER))

soak: $(VENV)/for-test
	$(PY) -m bench.soak --minutes $(MINUTES)

storms: $(VENV)/for-test
	$(PY) -m bench.soak --minutes 1 --times $(TIMES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# venv of Debian's Python is a package of its own.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "qmflask needs Python 3.10 or newer")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/packages ensurepip:python3-venv
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/for-run: $(VENV)/made setup.cfg setup.py
	$(PIP) install --use-pep517 --editable .
	@touch $@

$(VENV)/for-test: $(VENV)/made setup.cfg setup.py
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned test tools need Python 3.11: rm -r .venv, then make test PYTHON=python3.11")'
	$(PIP) install --use-pep517 --editable '.[test,dev]'
	@touch $@ $(VENV)/for-run
