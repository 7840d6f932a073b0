"""Why a module is one layer although nobody asked for that, and what to change so that it can be cut."""

from dataclasses import dataclass, replace

from bapipe.printable import shortened

PUT_APART = "put the lines of this into a module of their own, which is then the only one"
REGISTER_INSIDE = (
    "register the hook on modules inside, do in the forward what it does, or remove it if nothing needs it"
)
WRITE_INSIDE = "write to it in the forward of a module without children that has it"
DRAW_INSIDE = "choose by `torch.where`; to leave modules out by chance, draw in the forwards of these modules"
GIVE_TENSORS = "give the tensors as arguments of their own, and call modules in the forward of the one that has them"
RETURN_VALUES = "return the values, or keep them in a module of their own"
CHOOSE_WITHOUT_VALUES = (
    "choose by `torch.where` or a mask in place of reading values, or put the lines that read them into a module of "
    "their own"
)
TAKE_ANY_NUMBER = (
    "make constants by `torch.tensor`, or in `__init__` with `register_buffer`, and let the code take any number of "
    "samples; or put the line that fails into a module of its own"
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a module is one layer.

    Attributes:
        text: why, of "it", the module.
        to_cut: what to change so that it can be cut; empty if the text says so itself.
    """

    text: str
    to_cut: str = PUT_APART

    def __str__(self) -> str:
        return self.text

    def behind(self, words: str) -> "Reason":
        """Returns the reason with some words before it."""
        return replace(self, text=f"{words}{self.text}")

    @property
    def with_advice(self) -> str:
        """The reason, and what to change."""
        return f"{self.text}; to cut it, {self.to_cut}" if self.to_cut else self.text


def not_handed_on(layer: str, value: object) -> Reason:
    """Returns why a layer is no layer of its own: it gives other layers a value that is no tensor."""
    is_constant = value is None or isinstance(value, bool | str | int | float | complex)
    what = f"{shortened(repr(value))} ({type(value).__name__})" if is_constant else f"a {type(value).__name__}"
    text = f"layer '{layer}' gives other layers {what}; only tensors can cross between layers"
    return Reason(text, _in_place_of(value))


def _in_place_of(value: object) -> str:
    """Returns what to do in place of giving other layers a value."""
    if isinstance(value, bool | str):
        return "compute what it chooses in the layer that uses it, from a tensor or from what `__init__` was given"
    if isinstance(value, int | float | complex):
        return "compute it from a tensor in the layer that uses it"
    if value is None:
        return "give the layer that uses it a tensor in any case, such as one of zeros, or leave the argument out"
    return "give the layer that uses it its tensors as arguments of their own"


SETS_UP_AT_FIRST = Reason(
    "its forward does something in its first call alone, as setting values by the first samples: call the model once "
    "on samples where it is made, so that this is done",
    to_cut="",
)
