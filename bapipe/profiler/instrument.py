"""A traced model that reports, while all of it runs, which of its layers runs, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bapipe.equivalence.outcome import Loss, check_scalar
from bapipe.errors import InvalidModel, first_line
from bapipe.formats.profile import LOSS
from bapipe.profiler.split_backward import WeightGroup, find_weight_groups, run_input_grads
from bapipe.torch_device import is_out_of_memory
from bapipe.torch_settings import autocast_on
from bapipe.tracing.code_position import failed_line
from bapipe.tracing.control_flow import control_flow_in_words
from bapipe.tracing.extract import GradMode, ModesModule
from bapipe.tracing.model import TracedModel, layer_states
from bapipe.tracing.reasons import not_handed_on
from bapipe.tracing.recording import in_words
from bapipe.tracing.structure import OtherStructure, add_structure_check


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """The training pass to measure: a traced model, its loss, and a batch.

    Attributes:
        inputs: the batch, in the order of the model's inputs.
        autocast: the dtype that the forward computes in under autocast; None without autocast.
    """

    model: TracedModel
    loss: Loss
    inputs: tuple[Tensor, ...]
    target: Tensor
    autocast: torch.dtype | None = None

    def autocast_context(self) -> torch.autocast:
        """Returns the context that the forward runs in."""
        return autocast_on(self.device, self.autocast)

    def loss_of(self, module: nn.Module) -> Tensor:
        """Returns the loss of the batch with a module that returns the model's outputs as a tuple."""
        with self.autocast_context():
            # A call of the module itself would let torch.fx write to stderr if a layer fails.
            return self.loss(self.model.result.rebuild(module.forward(*self.inputs)), self.target)

    def model_loss(self) -> Tensor:
        """Returns the loss of the batch with the model's own code."""
        with self.autocast_context():
            return self.loss(self.model.root(*self.inputs), self.target)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def num_samples(self) -> int:
        return self.target.shape[0] if self.target.dim() else 0


@dataclass(slots=True, kw_only=True)
class InstrumentedModel:
    """A model whose layers call `enter` with their number when they begin; number `num_layers` is the loss.

    Work of the instrumentation itself is reported under number `num_layers` + 1; on a CPU only, because it is none for
    another device.

    In the backward, a layer begins when autograd runs the operator that computed one of its outputs. Layers that run
    alternately report each time, so the time between two reports belongs to the layer of the earlier one.

    Attributes:
        running: the layer that reported last.
        tensors: size and gradient of the layers' outputs in the latest forward, by name.
        roots: outputs of layers that have no input with a gradient: I ends there. None after a backward: their graph
            calls this object, so together they would never be freed.
        owners: the first layer that uses each parameter, by the parameter's id.
        tied: ids of the parameters that several layers use.
        shared: ids of those, and of the parameters whose W shares a node with that of others.
    """

    training_pass: TrainingPass
    enter: Callable[[int], None]
    module: fx.GraphModule = field(init=False)
    running: int = 0
    tensors: dict[str, "TensorInfo"] = field(default_factory=dict)
    roots: list[GradientEdge] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)
    tied: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.module = _instrument(self.training_pass.model, self._enter, self._record_output)
        for layer, parameters in enumerate(parameters_of(self.training_pass.model)):
            for parameter in map(id, parameters):
                if self.owners.setdefault(parameter, layer) != layer:
                    self.tied.add(parameter)
        self.shared |= self.tied

    @property
    def num_layers(self) -> int:
        return len(self.training_pass.model.layers)

    def forward(self) -> Tensor:
        """Returns the loss of a forward in which the layers and the loss report."""
        self.tensors.clear()
        self.roots.clear()
        try:
            loss = replace(self.training_pass, loss=self._loss).loss_of(self.module)
            check_loss(loss)
            return loss
        except InvalidModel:
            raise
        except Exception as error:  # whatever a layer raises
            raise self._failed("forward", error) from error

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._enter(self.num_layers)
        return self.training_pass.loss(output, target)

    def backward(self, loss: Tensor) -> None:
        """Runs B, adding to the gradients of the parameters; the layers report."""
        self._run_backward(loss.backward, self.num_layers)
        self.roots.clear()

    def backward_inputs(self, loss: Tensor, *, with_tied: bool = False) -> tuple[WeightGroup, ...]:
        """Runs I and returns the groups for W; the search of torch for these is reported as `num_layers` + 1.

        Parameters that several layers use have groups `with_tied` only: their W would run the nodes of all layers in
        between, so that none of those could be run apart. In a pipeline they mostly are in different stages.
        """
        self._enter(self.num_layers + 1)
        parameters = self.training_pass.model.module.parameters()
        groups = find_weight_groups(loss, self.roots, (p for p in parameters if with_tied or id(p) not in self.tied))
        if not with_tied:
            self.shared |= {id(parameter) for g in groups if g.is_whole for parameter in g.parameters}
        self._run_backward(lambda: run_input_grads(loss, self.roots, groups, lambda: self.running), self.num_layers)
        self.roots.clear()
        return groups

    def backward_weights(self, groups: Sequence[WeightGroup]) -> None:
        """Runs W after I, adding to the gradients of the parameters; the layers report.

        Parameters that several layers use are left out: a path leads to them from the later layer through the earlier
        one, and torch's W would run all operators on it a second time.
        """
        for group in groups:
            if not self.is_shared(group):
                self._run_backward(group.run, self.layer_of(group))

    def is_shared(self, group: WeightGroup) -> bool:
        """Returns whether several layers use one of the group's parameters."""
        return any(id(parameter) in self.shared for parameter in group.parameters)

    @property
    def sharing_layers(self) -> set[int]:
        """The layers that use a parameter which another layer uses too."""
        parameters_of_layer = enumerate(parameters_of(self.training_pass.model))
        return {layer for layer, parameters in parameters_of_layer if any(id(p) in self.shared for p in parameters)}

    def layer_of(self, group: WeightGroup) -> int:
        """Returns the first layer that uses the group's parameters."""
        return min(self.owners[id(parameter)] for parameter in group.parameters)

    def _run_backward(self, run: Callable[[], object], layer: int) -> None:
        try:
            self._enter(layer)
            run()
        except Exception as error:  # whatever a layer raises
            raise self._failed("backward", error) from error

    def _enter(self, layer: int) -> None:
        self.running = layer
        self.enter(layer)

    def _record_output(self, layer: int, name: str, value: object) -> None:
        on_cpu = self.training_pass.device.type == "cpu"
        if on_cpu:
            self.enter(self.num_layers + 1)
        traced = self.training_pass.model.layers[layer]
        if not isinstance(value, Tensor):
            reason = not_handed_on(traced.name, value)
            raise InvalidModel(f"{reason}: {reason.to_cut}")
        self.tensors[name] = TensorInfo(
            num_bytes=value.numel() * value.element_size(), has_gradient=value.requires_grad
        )
        if value.grad_fn is not None:
            value.grad_fn.register_prehook(lambda _: self._enter(layer))
            if not any(source in self.tensors and self.tensors[source].has_gradient for source in traced.inputs):
                # The edge is taken now, because a later layer may change the tensor in place.
                self.roots.append(get_gradient_edge(value))
        if on_cpu:
            self.enter(layer)

    def _failed(self, phase: str, error: Exception) -> InvalidModel:
        layers = self.training_pass.model.layers
        name = layers[self.running].name if self.running < len(layers) else LOSS
        return layer_error(name, phase, self.training_pass, error)


def check_loss(loss: Tensor) -> None:
    """Raises InvalidModel unless the loss is a scalar tensor with a gradient."""
    check_scalar(loss)
    if not loss.requires_grad:
        raise InvalidModel(
            "the loss has no gradient, so nothing would be trained: look for torch.no_grad() or detach() in the "
            "model's last layers or in the loss"
        )


def layer_error(name: str, phase: str, training_pass: TrainingPass, error: Exception) -> InvalidModel:
    """Returns the error that says which layer failed in which phase, and what may help."""
    size = training_pass.num_samples
    if is_out_of_memory(error):
        return InvalidModel(
            f"layer '{name}' ran out of memory in its {phase} at micro-batch size {size}: measure smaller "
            "`microbatch_sizes`, or one layer at a time with `layer_by_layer`"
        )
    if isinstance(error, OtherStructure):
        return InvalidModel(f"at micro-batch size {size}, {error}")
    if "modified by an inplace operation" in str(error) or "leaf Variable that requires grad" in str(error):
        return InvalidModel(
            f"layer '{name}' failed in its {phase} at micro-batch size {size}: a layer changes in place what its "
            "backward needs: set inplace=False in that layer, or compute a new tensor there "
            f"({str(error).split(';')[0]})"
        )
    failed = f"layer '{name}' failed in its {phase} at micro-batch size {size}: {type(error).__name__}"
    return InvalidModel(control_flow_in_words(error) or f"{failed}: {first_line(error)}")


def own_failure(training_pass: TrainingPass, error: InvalidModel) -> InvalidModel | None:
    """Returns the error that says how the model's own code fails, where one of its layers, traced, has failed.

    None if it does not, or if that is what `error` says.
    """
    try:
        with training_pass.autocast_context():
            training_pass.model.root(*training_pass.inputs)
    except Exception as failed:  # whatever the model's own code raises
        if first_line(failed) in str(error) or is_out_of_memory(failed):
            return None
        name, line = type(training_pass.model.root).__name__, failed_line(failed) or ""
        itself = f"{name} itself fails at micro-batch size {training_pass.num_samples}: {in_words(failed)}{line}"
        return InvalidModel(control_flow_in_words(failed) or itself)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The facts of a layer's output that a profile records."""

    num_bytes: int
    has_gradient: bool


def parameters_of(model: TracedModel) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Returns for each of `model.layers` the parameters that it uses, each once."""
    states = layer_states(model)
    return tuple(
        tuple({id(tensor): tensor for tensor in state.values() if isinstance(tensor, nn.Parameter)}.values())
        for state in (states[layer.name] for layer in model.layers)
    )


def _instrument(
    model: TracedModel, enter: Callable[[int], None], record_output: Callable[[int, str, object], None]
) -> fx.GraphModule:
    """Returns the model with calls of `enter` before a layer's operators and of `record_output` after each output."""

    def enter_layer(layer: int) -> None:  # torch.fx calls plain functions only
        enter(layer)

    def record(layer: int, name: str, value: object) -> None:
        record_output(layer, name, value)

    number = {layer.name: index for index, layer in enumerate(model.layers)}
    name_of = {node: name for name, node in model.node_of.items()}
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    gradients = GradMode(graph)
    running = None
    for node in model.module.graph.nodes:
        layer = number[model.layer_of[node]] if node in model.layer_of else None
        if layer is not None and layer != running:
            graph.call_function(enter_layer, (layer,))
            running = layer
        gradients.enter(node)
        copy[node] = graph.node_copy(node, copy.__getitem__)
        add_structure_check(graph, node, copy[node], model.layer_of.get(node, ""))
        if layer is not None and node in name_of:
            graph.call_function(record, (layer, name_of[node], copy[node]))
    return ModesModule(model.module, graph)
