"""What a layer reads to compute its outputs: what it takes to say which layers a group can split, and how."""

import msgspec

from bapipe.units import NonNegative, Positive


class LayerShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The channels and planes of a layer. Planes are those of the first axis behind batch and channels.

    Attributes:
        in_channels, out_channels: of its input and of its outputs; left out if the layer cannot be split by channels.
        mixes_channels: whether an output channel is computed from all input channels. If not, from its own.
        in_planes, out_planes: of its input and of its outputs; left out if the layer cannot be split by planes.
        window, stride, padding: an output plane reads `window` planes; the first begins `padding` planes before the
            input, each further one `stride` planes later.
        sums_samples: whether it needs sums over all samples and planes of a micro-batch, as a batch norm does.
        heads: of a layer that computes queries, keys or values, the heads of attention that members can share: those of
            the keys. Queries that read the same keys stay together.
        attends: whether such a layer attends, too; its output channels are those of the heads, one after the other.
        elementwise_inputs: those of its inputs that its module does not read, only the elementwise operators behind it.
    """

    in_channels: Positive | msgspec.UnsetType = msgspec.UNSET
    out_channels: Positive | msgspec.UnsetType = msgspec.UNSET
    mixes_channels: bool = True
    in_planes: Positive | msgspec.UnsetType = msgspec.UNSET
    out_planes: Positive | msgspec.UnsetType = msgspec.UNSET
    window: Positive = 1
    stride: Positive = 1
    padding: NonNegative = 0
    sums_samples: bool = False
    heads: Positive | msgspec.UnsetType = msgspec.UNSET
    attends: bool = False
    elementwise_inputs: tuple[str, ...] = ()
