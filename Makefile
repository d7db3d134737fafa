# Every target makes the virtual environment it needs; nothing but Python >= 3.11 and make comes before.
PYTHON ?= python3
VENV := .venv
SGLANG_VENV := .venv-sglang
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-sglang test test-sglang lint bench clean

demo: $(VENV)/.ready
	$(VENV)/bin/weightcast demo

demo-sglang: $(VENV)/.ready $(SGLANG_VENV)/.ready
	$(VENV)/bin/weightcast demo --engine sglang --sglang-python $(SGLANG_VENV)/bin/python --tp 1,1,2

test: $(VENV)/.ready
	$(VENV)/bin/pytest

test-sglang: $(VENV)/.ready $(SGLANG_VENV)/.ready
	WEIGHTCAST_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) $(VENV)/bin/pytest -m sglang

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	mkdir -p build/types/weightcast
	for part in proto broadcaster rollout_node trainer_hooks; do ln -sfn ../../../$$part build/types/weightcast/$$part; done
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.ready
	$(VENV)/bin/python bench/push_memory.py

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightcast needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[test,lint]'
	touch $@

# The real SGLang on a CPU, in an environment of its own: it pins much that weightcast does not.
$(SGLANG_VENV)/.ready: $(wildcard tests/sglang_cpu/*.txt tests/sglang_cpu/site/*)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python tests/sglang_cpu/install.py
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build *.egg-info
