"""What `rljob validate` and `plan` show of the model's files."""

import json

from rljob_cli.check.from_model import describe_from_model
from rljob_inputs.models.defaults import FromModel
from tests.support.model_folder import write_model
from tests.unit.rljob_cli.test_main import rljob

THINKS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ '<think>' if add_generation_prompt }}"
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [256, 7]}
SHOWN = """\
  from the model's files:
    spec.rollout.maxModelLen           8192                         config.json: the model's context
    spec.rollout.sampling.maxTokens    4096                         chat_template.jinja: the model may think before it \
answers; half of the context 8192
    spec.rollout.sampling.temperature  1                            training needs the whole distribution; \
generation_config.json has temperature 0.6, top_p 0.95
    spec.rollout.sampling.stop         </s> 7                       generation_config.json and the tokenizer: end of \
sequence
    spec.evaluation.sampling           temperature 0.6, topP 0.95   generation_config.json: do_sample
"""
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: thinks}
spec:
  model: {source: ./model}
  data: {train: {source: rows.jsonl}, eval: {source: rows.jsonl}}
  rewards: [{name: r, function: {inline: "def compute_score(completion): return 1.0"}}]
"""


def write_job(folder):
    model = write_model(folder / "model", {"max_position_embeddings": 8192}, chat_template=THINKS)
    (model / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def test_validate_shows_field_value_and_file(tmp_path):
    code, output = rljob("validate", write_job(tmp_path), "--no-call")
    assert code == 0
    shown = output[output.index("  from the model") :].partition("  spec.data.train:")[0]
    assert "\n".join(" ".join(line.split()) for line in shown.splitlines()) == (
        "\n".join(" ".join(line.split()) for line in SHOWN.splitlines())
    )


def test_json_has_it_as_data(tmp_path):
    job = write_job(tmp_path)
    for command in (("validate", job, "--no-call"), ("plan", job)):
        code, output = rljob(*command, "-o", "json")
        assert code == 0, output
        (file,) = json.loads(output[output.index("{") :])["files"]
        values = {each["field"]: each["value"] for each in file["from_model"]}
        assert values["spec.rollout.sampling.maxTokens"] == 4096
        assert values["spec.rollout.sampling.stop"] == ["</s>", "7"]
        assert values["spec.evaluation.sampling"] == {"temperature": 0.6, "topP": 0.95}
    assert file["row_tokens"] > 4096, "the plan has the length of the model"


def test_plan_shows_it_below_its_table(tmp_path):
    code, output = rljob("plan", write_job(tmp_path))
    assert code == 0
    shown = output.partition("from the model's files:\n")[2].splitlines()
    assert [line.split()[0] for line in shown if line.startswith("  spec.")] == [
        "spec.rollout.maxModelLen",
        "spec.rollout.sampling.maxTokens",
    ], "what memory depends on"


def test_nothing_is_shown_of_a_model_that_cannot_be_read_from_here(tmp_path):
    job = write_job(tmp_path)
    job.write_text(JOB.replace("./model", "pvc://models/m"))
    code, output = rljob("validate", job, "--no-call")
    assert code == 0
    assert "from the model" not in output


def test_columns_are_aligned_and_texts_have_no_control_characters():
    values = [FromModel("a", ["\x1b[31m", "b"], "c"), FromModel("long", 1.5, "d\n")]
    assert describe_from_model(values) == ["from the model's files:", "  a      [31m b  c", "  long  1.5      d "]
    assert describe_from_model([]) == []
