# make demo    the demo station: own environment, no torch, no broker, no GPU, no display needed
# make test    the whole test suite in its own environment, with torch
# make faults  the failure matrix of the MES link against a real broker, counted (docs/DELIVERY.md)
# make soak    the demo line for an hour against a real broker: does anything grow? SOAK_MINUTES=8
# make check   format, lint, types, import rules
# make test-edge    what a station runs, in an environment without torch; ORT=1.23.2 picks a release
# Packages come from wherever pip is set up to find them (pip.conf, PIP_* variables).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
PARTS ?= 12
STATION ?= station_config/demo/station.yaml
PYTEST_ARGS ?=
FAULTS_ARGS ?=
ORT ?= newest
SOAK_MINUTES ?= 60

DEMO := .venv
TEST := .venv-test
EDGE := .venv-edge-$(ORT)
EDGE_TESTS := $(addprefix tests/,assurance bundles capture contract geometry hmi mes rollout sim \
  station triggers vlm)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-edge faults soak check format system clean

help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | head -7
	@echo "PARTS=n parts of the demo (default 12), PYTHON=python3.x, PYTEST_ARGS='-k verdict'"

demo: $(DEMO)/installed
	$(DEMO)/bin/forge-station demo --station $(STATION) --parts $(PARTS)

test: $(TEST)/installed system
	$(TEST)/bin/python -m pytest $(PYTEST_ARGS)

test-edge: $(EDGE)/installed system
	$(EDGE)/bin/python -c 'import onnxruntime as o; print("ONNX Runtime", o.__version__)'
	$(EDGE)/bin/python -m pytest $(EDGE_TESTS) $(PYTEST_ARGS)

faults: $(TEST)/installed system
	PYTHONPATH=edge:. $(TEST)/bin/python -m tests.mes.faults $(FAULTS_ARGS)

soak: $(TEST)/installed system
	PYTHONPATH=edge:. $(TEST)/bin/python -m deploy.soak --minutes $(SOAK_MINUTES)

check: $(TEST)/installed
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/ruff check .
	$(TEST)/bin/mypy edge export training deploy
	PYTHONPATH=edge:. $(TEST)/bin/lint-imports

format: $(TEST)/installed
	$(TEST)/bin/ruff format .
	$(TEST)/bin/ruff check --fix .

# The stamp files keep a second run quick; a change of pyproject.toml installs again.
$(DEMO)/installed: pyproject.toml
	@$(call new_environment,$(DEMO))
	$(DEMO)/bin/python $(PIP_INSTALL) -e '.[demo]'
	@touch $@

# torch by itself and first, so that the build found by pip's own settings (CPU or CUDA) stays.
$(TEST)/torch: pyproject.toml
	@$(call new_environment,$(TEST))
	$(TEST)/bin/python $(PIP_INSTALL) 'torch==2.13.0'
	@touch $@

$(TEST)/installed: $(TEST)/torch
	$(TEST)/bin/python $(PIP_INSTALL) -e '.[demo,commands,plc,sparkplug,opcua,metrics,hmi,projector,pointcloud,genicam,basler,export,training,cluster,dev]'
	@touch $@

# onnx and tqdm write the bundles of random checkpoints that the tests open; a station has neither.
$(EDGE)/installed: pyproject.toml
	@$(call new_environment,$(EDGE))
	$(EDGE)/bin/python $(PIP_INSTALL) -e '.[demo,commands,plc,sparkplug,opcua,metrics,hmi,projector,pointcloud,genicam,basler,dev]' 'onnx==1.23.2' 'tqdm>=4.67' \
	  '$(if $(filter newest,$(ORT)),onnxruntime,onnxruntime==$(ORT))'
	$(EDGE)/bin/python -c 'import importlib.util as u, sys; sys.exit(bool(u.find_spec("torch")))'
	@touch $@

define new_environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "forge-station needs Python 3.10 or later; $(PYTHON) is older (make PYTHON=...)" >&2; exit 1; }; \
	echo "installing into $(1): some minutes, the first time only"; \
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# Programs that tests run, and their Debian packages: a full MQTT broker, Aravis with its fake GigE
# Vision camera, a virtual X screen for the projector's window, systemd, which checks the unit, and
# Chromium, which shows the operator's page; a Chinese font, where there is none.
# RUNLEVEL=1 keeps a package from starting its service.
SYSTEM := mosquitto:mosquitto arv-fake-gv-camera-0.8:aravis-tools Xvfb:xvfb systemd-analyze:systemd \
  chromium:chromium

system:
	@missing=; \
	for pair in $(SYSTEM); do \
	  PATH="$$PATH:/usr/sbin" command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	test -n "$$(fc-list :lang=zh 2>/dev/null)" || missing="$$missing fonts-wqy-microhei fontconfig"; \
	if test -z "$$missing"; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing for the tests:$$missing"; \
	  apt-get update -qq; \
	  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	  echo "missing here, and not root on Debian:$$missing; the tests that need them will be skipped"; \
	fi

clean:
	rm -rf $(DEMO) $(TEST) .venv-edge-* out
