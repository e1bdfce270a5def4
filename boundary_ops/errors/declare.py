"""Lists what cannot be declared: schemas, arguments, implementations and rows of ops."""

from __future__ import annotations

from boundary_ops.errors import BoundaryOpError


class UnreadableSchema(BoundaryOpError):
    """The text of a schema cannot be parsed, or its name has no namespace."""

    what = "schema {schema!r} {reason}"
    rule = "an op is declared by its torch schema, and found by its name with a namespace"
    fix = 'write it as "ns::op(Tensor q, Tensor(a!) out) -> ()"'


class ReturnsResult(BoundaryOpError):
    """The op returns something."""

    what = "op '{op}'"
    expected = "a schema that returns nothing, '-> ()'"
    got = "'-> {returns}'"
    rule = "a boundary op writes its result into memory of its caller, whose address stays the same"
    fix = (
        "allocate the result in the model (torch.empty), pass it as 'Tensor(a!) out', write into it; "
        "for an existing op, define a small op that calls it and copies its result"
    )


class WritesNothing(BoundaryOpError):
    """The op's schema marks no argument as written."""

    what = "op '{op}'"
    expected = "at least one argument marked as written, such as 'Tensor(a!) out'"
    got = "{schema}"
    rule = "an op that returns nothing and writes nothing is dead code in a graph"
    fix = "mark each tensor that the op writes with its own alias letter: (a!), (b!), ..."


class UnknownArgument(BoundaryOpError):
    """A declaration names an argument that the schema lacks or that cannot be meant."""

    what = "op '{op}', {option}"
    expected = "one of the {kind} {choices}"
    rule = "a declaration names arguments of the op's schema, of the kind that it is about"
    fix = "use the argument names of the schema"


class WrongTokenArgs(BoundaryOpError):
    """`token_args` is not a mapping with entries."""

    what = "op '{op}', token_args"
    expected = "a non-empty dict of argument name -> dim, or None"
    rule = "token_args say where the token count is"
    fix = 'pass for example {{"q": 0, "out": 0}}, or leave token_args out'


class WrongTokenDim(BoundaryOpError):
    """Where an argument or a result is said to have its tokens is no dim."""

    what = "op '{op}', {option}"
    expected = "a dim counted from the front, 0 or more{words}"
    rule = "token rows are along one dim of a tensor, or along the dims that a word stands for"
    fix = "count the dim from the front, for example 0 for [num_tokens, heads, head_dim]"


class WrongImplementation(BoundaryOpError):
    """`impl` is neither callable nor a mapping from devices to callables."""

    what = "op '{op}', impl"
    expected = "a callable, or a dict from device ({devices}) to callable"
    rule = "each device that the op runs on has an implementation"
    fix = 'pass one callable for all devices, or for example {{"cpu": f, "cuda": g}}'


class WrongCapturedForm(BoundaryOpError):
    """An op and its captured form do not write the same arguments, or one of them is not capture-safe."""

    what = "op '{op}', captured_form"
    expected = "capture_safe=True for both ops, and a form that writes {writes}"
    rule = "the form does in a graph what the op does outside of it"
    fix = "declare both capture_safe=True, and give what they write the same names"


class AmbiguousOverload(BoundaryOpError):
    """An op has several overloads, none of them the default one."""

    what = "op '{op}' has several overloads and no default one"
    expected = "one of {overloads}"
    got = "{op}"
    rule = "an op is one overload, because overloads differ in what they take and write"
    fix = 'name the overload: "{overloads[0]}"'


class UnknownOp(BoundaryOpError):
    """torch's dispatcher knows no op of that name."""

    what = "op '{op}' does not exist in torch's dispatcher"
    expected = 'the name of a loaded op, "ns::op" or "ns::op.overload"'
    got = "{op!r}"
    rule = "an op is declared once it exists; `boundary_ops.define` makes new ones"
    fix = "import the library that defines the op first"


class OpExists(BoundaryOpError):
    """`define` was given the name of an op that somebody else has defined."""

    what = "op '{op}': it exists already and was not defined here"
    rule = "`define` makes new ops"
    fix = 'declare the existing op with boundary_ops.register("{op}"), or choose another name'


class SchemaChanged(BoundaryOpError):
    """An op is defined again with another schema."""

    what = "op '{op}' is already defined with another schema"
    rule = "an op keeps its schema for the life of the process, because graphs hold on to it"
    fix = "choose another name, or restart Python"


class NotDeclared(BoundaryOpError):
    """No boundary op of that name is declared."""

    what = "op '{op}' is not declared as a boundary op"
    expected = "one of {declared}"
    rule = "only a declared op can be taken back"
    fix = "boundary_ops.registered() lists the declared ops"


class NoImplementation(BoundaryOpError):
    """An op was called with tensors of a device for which it has no implementation."""

    what = "op '{op}' has no implementation for device '{device}'"
    expected = "tensors on one of {devices}"
    got = "{device}"
    rule = "an op runs only on the devices that it was defined for"
    fix = 'add "{device}" to the impl dict of boundary_ops.define, or move the model'


class MissingTokenDim(BoundaryOpError):
    """A call's tensor has fewer dims than `token_args` say."""

    what = "op '{op}', argument '{argument}'"
    expected = "at least {num_dims} dims, because token_args declare dim {dim}"
    rule = "the declared token dim exists in every call"
    fix = "correct token_args, or the shape that the model passes"


class WrongRowsArgument(BoundaryOpError):
    """An argument of `declare_rows` has another type."""

    what = "declare_rows, {argument}"
    expected = '"lib::op", token_args={{name: dim}}, token_results=(dim, ...), only={{name: value}}'
    rule = "an op is declared by its name and by names of its arguments"
    fix = "correct {argument}"


class RowsOfTorchOp(BoundaryOpError):
    """`declare_rows` was given an op of torch itself."""

    what = "op '{op}'"
    expected = "an op of a library"
    got = "one of torch's own"
    rule = "torch's ops have rules, or run eagerly: a declaration would not be read"
    fix = "declare an op of your own that calls it: torch.library.custom_op makes one"


class RowsOfWritingOp(BoundaryOpError):
    """`declare_rows` was given an op that writes into its arguments."""

    what = "op '{op}'"
    expected = "an op that writes into none of its arguments"
    rule = "rows are followed from arguments to new results"
    fix = "call a form of it that returns its result, or make it a boundary op: boundary_ops.register"


class WrongTokenResults(BoundaryOpError):
    """`token_results` says nothing of some result, or of more than there are."""

    what = "op '{op}', token_results"
    expected = "one for each of {count} results"
    rule = "each result carries tokens somewhere, or not at all"
    fix = "for example (0,) for one result of [num_tokens, hidden], None for a result without tokens"


class WrongPadded(BoundaryOpError):
    """`padded` is no way to treat padded rows."""

    what = "op '{op}', padded"
    expected = "'real' or 'anything'"
    rule = "a padded row that equals a real one gives the real one's result, or nothing is known of it"
    fix = "leave it out for an op without state between rows"


class RowsNotDeclared(BoundaryOpError):
    """`check_rows` was given an op of which nothing was declared."""

    what = "op '{op}': nothing was declared of its rows"
    rule = "a declaration is tested, not an op"
    fix = 'call boundary_ops.declare_rows("{op}", ...) first'


class RowsRefuted(BoundaryOpError):
    """A test has shown that an op does not treat its rows as declared."""

    what = "op '{op}', as declared by declare_rows"
    rule = "the op treats each token row alone"
    fix = "correct the declaration, or take it back by token_args=None: the op then runs eagerly"
