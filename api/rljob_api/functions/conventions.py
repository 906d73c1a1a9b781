"""How functions and classes are called: the types of a form, RLJob's own forms, and those of plugins in one table.

An entry has what identifies a form, what each parameter gets, whether arguments are lists with one element per sample,
and how the return value is read. `forms` matches a function with the table. What only a worker does (binding an object,
reading an unusual return value) is a reference, MODULE:NAME, so that the CLI does not import it. Standard
library only: workers import this file.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from rljob_api.functions import values
from rljob_api.functions.descriptions import Class
from rljob_api.functions.plugins import load_reference
from rljob_api.functions.values import Value

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Convention(NamedTuple):
    """One form of functions: their parameters, their arguments, their result."""

    name: str
    """Value of function.signature: the name of the plugin's entry point."""
    form: str
    """How it is written, for messages and docs."""
    markers: tuple[str, ...]
    """Parameters that the form has. `NAME: str` is a parameter with that annotation."""
    arguments: Mapping[str, Value]
    """What each parameter gets. A function takes those that it names, or all with **kwargs (token ids and steps only if
    it reads them)."""
    rank: int = 100
    """Forms that fit a function are tried in the order of their ranks. 100: markers that only this project has. Above
    it: markers that other forms have, too. RLJob's own have 500."""
    lists: bool = False
    """Whether each argument is a list with one element per sample."""
    returns: Literal["score", "numbers"] = "score"
    """How a sample's part of the return value is read. score: a number, a tuple that begins with it, or a dict or
    record with `score`. numbers: a number or None."""
    read_returned: str = ""
    """MODULE:NAME of a function that reads the whole return value instead: (value, num_samples) -> list[Outcome]."""
    whole: bool = False
    """Whether the completion of an agent's episode is all that followed the prompt, results of tools included. Else it
    is the last answer."""
    has_columns: bool = False
    """Whether the project passes all columns of the data: those that no parameter names go to **kwargs."""
    callbacks: Mapping[str, Literal["component", "ignored"]] = _NOTHING
    """Parameters that get a function of the project's trainer, and what becomes of the name and the number that the
    user's function passes to it."""
    kwargs_parameter: str = ""
    """The parameter that gets function.kwargs as an object with attributes; empty: they are keyword arguments."""
    kwargs_defaults: Mapping[str, Any] = _NOTHING
    """Attributes that this object always has."""
    key_option: str = ""
    """The entry of function.kwargs that names the key of the score in a dict."""
    bases: tuple[str, ...] = ()
    """Base classes whose subclasses have this form, whatever their parameters."""
    literals: tuple[str, ...] = ()
    """Texts, one of which the source has where it is of this version of its project. Without one, only
    function.signature chooses the form. Empty: the parameters tell it."""
    constructor_parameter: str = ""
    """For classes: the constructor's parameter that gets function.factoryArgs as an object with attributes; empty: they
    are keyword arguments."""


class ObjectForm(NamedTuple):
    """A class or an object that scores in a way which no Convention describes."""

    name: str
    """What /v1/info reports as its signature."""
    matches: Callable[[Class], bool]
    check: Callable[[Class, str], None]
    """Takes the class and the scope. Raises FormError, with the fix, if it cannot be used."""
    bind: str
    """MODULE:NAME of a worker's function: (value, name, options, scope) -> Binding. `value`: the class or the object,
    `options`: function.factoryArgs."""


class SignaturePlugin(NamedTuple):
    """What an entry point of the group `rljob.signatures` names: the forms of one project.

    Its module imports the standard library and rljob_api.functions alone: the CLI reads it, too."""

    conventions: tuple[Convention, ...] = ()
    objects: tuple[ObjectForm, ...] = ()
    not_sent: Mapping[str, str] = _NOTHING
    """Parameters of the project's functions that no value exists for, and what to do."""


class Signatures(NamedTuple):
    """The forms that are known here: RLJob's own and those of plugins."""

    conventions: tuple[Convention, ...]
    """By their ranks, and where these are equal by the names of the plugins."""
    objects: tuple[ObjectForm, ...] = ()
    not_sent: Mapping[str, str] = _NOTHING
    broken: Mapping[str, str] = _NOTHING
    """Plugins that cannot be imported, and why. They cost only their own forms."""

    @property
    def names(self) -> list[str]:
        """The values of function.signature."""
        return ["auto", *sorted({convention.name for convention in self.conventions})]


_PLAIN: Final[Mapping[str, Value]] = {
    "prompt": values.PROMPT_TEXT,
    "question": values.PROMPT_TEXT,
    "query": values.PROMPT_TEXT,
    "completion": values.COMPLETION,
    "response": values.COMPLETION,
    "answer": values.GROUND_TRUTH,
    "ground_truth": values.GROUND_TRUTH,
    "label": values.GROUND_TRUTH,
    "reference": values.GROUND_TRUTH,
    "target": values.GROUND_TRUTH,
    "data_source": values.DATA_SOURCE,
    "extra_info": values.EXTRA_INFO,
    "prompt_ids": values.PROMPT_IDS,
    "completion_ids": values.COMPLETION_IDS,
}
_OWN: Final = tuple(
    Convention("plain", f"reward(prompt, {markers[0]}, ground_truth)", markers, _PLAIN, rank=500)
    for markers in (
        ("completion", "completion: str"), ("completion", "ground_truth"), ("completion", "label"), ("response",),
    )
)  # fmt: skip

BY_COLUMNS: Final = Convention("columns", "any parameters, named in function.columns", (), _NOTHING)
"""A function whose parameters are all named by function.columns and function.kwargs. With scope group: of lists."""


def collect(plugins: Iterable[SignaturePlugin], broken: Mapping[str, str] = _NOTHING) -> Signatures:
    """Return RLJob's own forms with those of the plugins."""
    given = list(plugins)
    conventions = [*_OWN, *(convention for plugin in given for convention in plugin.conventions)]
    return Signatures(
        tuple(sorted(conventions, key=lambda convention: convention.rank)),
        tuple(form for plugin in given for form in plugin.objects),
        {name: remedy for plugin in given for name, remedy in plugin.not_sent.items()},
        broken,
    )


def load_signatures(references: Mapping[str, str]) -> Signatures:
    """Return the forms of the plugins that find_plugins found."""
    loaded, broken = list[SignaturePlugin](), dict[str, str]()
    for name, reference in sorted(references.items()):
        try:
            plugin = load_reference(reference)
            if not isinstance(plugin, SignaturePlugin):
                raise TypeError(f"{reference} is not a SignaturePlugin")
            loaded.append(plugin)
        except Exception as error:  # of the plugin
            broken[name] = f"{type(error).__name__}: {error}"
    return collect(loaded, broken)
