# Two commands do all set-up: `make demo` trains a real model, `make test` passes the tests.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu, or gpu on a machine with CUDA: the extra that brings vLLM.
DEVICE ?= cpu
UV_VERSION := 0.13.8
# An own uv where the machine has none, so that nothing needs to be installed by hand.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
BIN := .venv/bin
# Reward requirements are installed with uv where it is on the PATH.
export PATH := $(CURDIR)/.tools/bin:$(PATH)
# One worker a core; the tests of a file share a worker, and so its servers.
PYTEST := $(BIN)/pytest -n auto --dist loadfile
SINCE ?= origin/main
SYNCED := .venv/.synced-$(DEVICE)

##@ Start here
.PHONY: demo
demo: $(SYNCED) ## Train SmolLM2-135M to add, end to end on this machine (3 to 6 minutes after installation)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/rljob run examples/quickstart/rljob.yaml --fresh

.PHONY: test
test: $(SYNCED) ## Lint, type and drift checks, and all tests but the slow ones (15 minutes on 2 cores)
	@$(MAKE) --no-print-directory -j2 -Otarget lint-text types verify test-unit
	@$(MAKE) --no-print-directory test-process test-integration

.PHONY: test-all
test-all: test test-slow ## make test, and what is slow and rarely fails: dashboards, judges on vLLM, rewards of other projects

.PHONY: example-chat example-gsm8k example-feedback example-guess example-calculator example-code-sandbox example-program example-environment
example-chat example-gsm8k example-feedback example-guess example-calculator example-code-sandbox example-program example-environment: example-%: $(SYNCED) ## Run an example: chat, gsm8k, feedback, guess, calculator, code-sandbox, program, environment
	$(BIN)/python examples/prepare.py $*
	$(BIN)/rljob run examples/$*/rljob.yaml --fresh

##@ On a cluster
.PHONY: cluster
cluster: $(SYNCED) ## A real Kubernetes on this machine: one node a pool, with the images (root, Debian)
	$(BIN)/python -m rljob_cluster.images --loadable
	$(BIN)/python -m rljob_cluster up
	$(BIN)/python -m rljob_cluster load

.PHONY: cluster-down
cluster-down: $(SYNCED) ## End it, and leave nothing behind
	$(BIN)/python -m rljob_cluster down

.PHONY: cluster-status
cluster-status: $(SYNCED) ## Its nodes and Pods
	@$(BIN)/python -m rljob_cluster status

.PHONY: demo-cluster
demo-cluster: cluster ## make demo's job by kubectl apply -k on that cluster, with its report
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python examples/run_on_cluster.py

.PHONY: e2e
e2e: $(SYNCED) ## The tiny job by kubectl apply, plain and with faults, on this machine's cluster (or E2E_CONTEXT=)
	$(BIN)/pytest e2e -s -v -m "not each" -x

.PHONY: e2e-faults
e2e-faults: $(SYNCED) ## The same with each fault and each kind of reward alone
	$(BIN)/pytest e2e -s -v

##@ Work on it
.PHONY: install
install: $(SYNCED) ## Install everything from the lock file into .venv

.PHONY: lint
lint: lint-text types ## ruff, import-linter, the check of the prose, and mypy

.PHONY: lint-text
lint-text: $(SYNCED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python dev/prose/check.py

.PHONY: types
types: $(SYNCED)
	$(BIN)/mypy

.PHONY: format
format: $(SYNCED) ## Format, and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: verify
verify: $(SYNCED) ## Fail when crds/, the chart's CRDs or docs/reference.md drifted from the types
	$(BIN)/python -m rljob_api.generate --check

.PHONY: generate
generate: $(SYNCED) ## Write crds/ and docs/reference.md from the types
	$(BIN)/python -m rljob_api.generate

.PHONY: test-unit
test-unit: $(SYNCED) ## Unit tests: no process is started (60 s)
	$(PYTEST) tests/unit -m "not slow"

.PHONY: test-process
test-process: $(SYNCED) ## Tests that start programs: reward servers, the CLI, FSDP2 ranks, helm
	$(BIN)/python examples/prepare.py tiny
	$(PYTEST) tests/process -m "not slow"

.PHONY: test-charts
test-charts: $(SYNCED) ## The Helm chart: suites, schemas of the last four minors, RBAC
	$(PYTEST) tests/process/charts

.PHONY: test-integration
test-integration: $(SYNCED) ## Integration tests: a real API server, vLLM, Ray and FSDP2 on this machine
	$(BIN)/python examples/prepare.py tiny
	$(PYTEST) tests/integration -m "not slow"

.PHONY: test-slow
test-slow: $(SYNCED) ## The tests that make test leaves out
	$(BIN)/python examples/prepare.py tiny
	$(PYTEST) tests -m "slow and not packages and not nightly"

.PHONY: test-convergence
test-convergence: $(SYNCED) ## A fault at every API write of a job's life, on a real API server, with a report (nightly; an hour)
	RLJOB_CONVERGENCE_DIR=.convergence $(BIN)/pytest -n auto --dist load tests/integration/apiserver/test_convergence.py -m nightly
	$(BIN)/python -m tests.integration.apiserver.convergence .convergence

.PHONY: chaos-local
chaos-local: $(SYNCED) ## Kill plans under each schedule, with real processes: 40 kills each (nightly; an hour)
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/pytest tests/integration/test_chaos_local.py -m nightly -s

.PHONY: test-packages
test-packages: $(SYNCED) ## Rewards of ms-swift, Trinity-RFT, AReaL, verl 0.9 and verifiers, unchanged (up to 6 GB each, an hour)
	$(BIN)/pytest tests/integration/packaged_rewards tests/integration/packaged_environments -m packages

.PHONY: test-changed
test-changed: $(SYNCED) ## The tests of what changed since the main branch (SINCE=REV for another base)
	$(BIN)/python dev/changed_tests.py --since $(SINCE) | xargs -r $(PYTEST) -m "not slow"

.PHONY: mutation
mutation: $(SYNCED) ## Break the pure cores on purpose and count what the unit tests notice (dev/mutation)
	$(BIN)/python dev/mutation/run.py

##@ Images
.PHONY: images
images: $(SYNCED) ## Build the images with docker or buildah; as root on Debian, installs buildah (docs/images.md)
	$(BIN)/python -m rljob_cluster.images

##@ Measure
.PHONY: bench-reward
bench-reward: $(SYNCED) ## Reward server against a bare aiohttp echo: 1 to 16,000 in flight, and open arrivals
	$(BIN)/python bench/reward.py

.PHONY: bench-trainer
bench-trainer: $(SYNCED) ## Samples/s of the quickstart model against TRL's GRPOTrainer, in one run
	$(UV) sync --frozen --extra $(DEVICE) --group bench --inexact
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/trainer.py

.PHONY: bench-weights
bench-weights: $(SYNCED) ## Weights from a publisher to 1 to 8 receivers, 0.1 to 1 GB, over the time of a memory copy
	$(BIN)/python bench/weights.py

.PHONY: bench-plan
bench-plan: $(SYNCED) ## The memory that rljob plan prints against torch's memory tracker, 0.135B to 32B, and a real rank (over 20 minutes on 2 busy cores)
	$(BIN)/python bench/plan.py --resident

.PHONY: bench-policy
bench-policy: $(SYNCED) ## The trainer's updates alone: tokens/s, share of the device's peak, memory (ARGS="--model 1.5b")
	$(BIN)/python bench/policy.py $(ARGS)

.PHONY: bench-seeds
bench-seeds: $(SYNCED) ## The demo on three seeds: held-out accuracy before and after
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/seeds.py

.PHONY: bench-autoscale
bench-autoscale: $(SYNCED) ## A simulated day of rewards: our autoscaler, HPA on CPU, fixed fleets
	$(BIN)/python bench/autoscale_day.py

.PHONY: bench-turn-credit
bench-turn-credit: $(SYNCED) ## Rewards of turns, credited by turn, against the same total at the end (2 minutes)
	$(BIN)/python bench/turn_credit.py

.PHONY: simulate-schedules
simulate-schedules: $(SYNCED) ## Predict a step's time by schedule: slow rewards at 7B, and long-tail generation (a minute)
	$(BIN)/python bench/simulate_schedules.py

.PHONY: bench-schedules
bench-schedules: $(SYNCED) ## The demo with each schedule on three seeds: held-out accuracy before and after (an hour)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/learning.py schedules

.PHONY: bench-algorithms
bench-algorithms: $(SYNCED) ## The demo with each algorithm: held-out accuracy before and after (40 minutes)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/learning.py algorithms

.PHONY: bench-agent-learning
bench-agent-learning: $(SYNCED) ## Examples with tools and a user on three seeds, with feedback and without: accuracy before and after (15 runs of some minutes)
	$(BIN)/python examples/prepare.py guess
	$(BIN)/python bench/learning.py agents

.PHONY: bench-overlap
bench-overlap: $(SYNCED) ## What slow rewards cost a step with each schedule, autoscaled or with fixed slots (40 minutes)
	$(BIN)/python examples/prepare.py gsm8k
	$(BIN)/python bench/overlap.py

.PHONY: bench-agents
bench-agents: $(SYNCED) ## The model gateway in front of vLLM: overhead per turn, full batches, 4,096 episodes
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/python bench/agents.py

.PHONY: bench-operator
bench-operator: $(SYNCED) ## What JOBS=200 jobs cost the operator, next to KubeRay's (KUBERAY=folder or URL; WINDOW=50)
	$(BIN)/python bench/operator_bench.py --jobs $(or $(JOBS),200) $(if $(WINDOW),--window $(WINDOW)) $(if $(KUBERAY),--kuberay-source=$(KUBERAY))

##@ Rest
.PHONY: clean
clean: ## Remove runs and caches; keep .venv and .models
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

.PHONY: help
help: ## Print the targets
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z][a-z0-9 -]*:.*##/ {printf "  make %-28s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(SYNCED): uv.lock pyproject.toml | $(UV)
	$(UV) sync --frozen --extra $(DEVICE) --inexact
	@rm -f .venv/.synced-*; touch $@

.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/pip install --quiet uv==$(UV_VERSION)
