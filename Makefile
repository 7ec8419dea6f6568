# Everything a clone needs: `make lab` opens the lab, `make test` runs all that needs no GPU. `make` lists the rest.

# The Python that .venv is made with, or that the GPU targets run with. Must be 3.10 or newer.
PYTHON ?= python3
# Added to the command that a target ends in: `make lab ARGS=--no-browser`.
ARGS ?=
# Test processes at a time.
JOBS ?= 2

ifeq ($(filter command environment,$(word 1,$(origin PYTHON))),)
# Nobody named one: look further when python3 is too old.
PYTHONS := $(PYTHON) python3.13 python3.12 python3.11 python3.10 python3.14
# The GPU targets install nothing; they take what `make setup` made, if it did.
GPU_PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
else
PYTHONS := $(PYTHON)
GPU_PYTHON := $(PYTHON)
endif

.DEFAULT_GOAL := help
.PHONY: help setup lab test check flashmla test-gpu record format notebooks badges site clean

help: ## list the targets
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv and fetch the default model; the first half of lab and test
	@$(call install,)

lab: ## set up (with a GPU: its attention libraries too), then open JupyterLab on the first notebook
	@$(call install,--model-optional --gpu-extra)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" exec .venv/bin/jupyter-lab $$([ "$$(id -u)" != 0 ] || echo --allow-root) \
		--ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test: ## set up, then run every check that needs no GPU
	@$(call install,)
	@.venv/bin/python labkit/dev/suite.py --jobs $(JOBS) $(ARGS)

check: ## run your own copy of the notebooks from top to bottom; NOTEBOOKS= names some of them
	@$(call install,--model-optional)
	LABKIT_COMPARE=0 .venv/bin/python -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout 300 \
		-p labkit.dev.nbval_plugin $(or $(NOTEBOOKS),notebooks) $(ARGS)

flashmla: ## on a Hopper GPU: install FlashMLA alone; its metadata asks for a newer torch, and it runs without
	$(GPU_PYTHON) -m pip install --no-deps sgl-flash-mla==1.0.0

test-gpu: ## the GPU suite with PYTHON as it is; installs nothing
	PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu -q $(ARGS)

record: ## record on this GPU every suite that the course shows; goes on where it stopped; installs nothing
	PYTHONPATH=. $(GPU_PYTHON) -m labkit.cli record $(if $(findstring --suite,$(ARGS)),,--suite course) $(ARGS)

format: ## format the code, sort imports, strip the notebooks' output
	@$(call install,--model-optional)
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .
	.venv/bin/python labkit/dev/notebooks.py strip

notebooks: ## run the notebooks, and store the lines that their checks print
	@$(call install,)
	.venv/bin/python labkit/dev/notebooks.py keep $(NOTEBOOKS)

badges: ## write Colab's badge and first cell, from [tool.labkit] in pyproject.toml, and README's table of chapters
	@$(call install,--model-optional)
	.venv/bin/python labkit/dev/notebooks.py badges
	.venv/bin/python labkit/dev/course_table.py

site: ## build the course as static pages in build/site, and check their links
	@$(call install,)
	.venv/bin/python labkit/dev/site.py --jobs $(JOBS) $(ARGS) $(NOTEBOOKS)

clean: ## remove .venv and every cache in this folder; the model's cache stays
	rm -rf .venv .cache .ruff_cache .mypy_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Runs the installer with the first Python that is new enough.
define install
for python in $(PYTHONS); do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
		exec "$$python" labkit/dev/install.py $(1); \
	fi; \
done; \
echo "labkit: needs Python 3.10 or newer, and found none (tried: $(PYTHONS)). Name one: make PYTHON=/path/to/python3" >&2; \
exit 1
endef
