"""Lists what cannot be declared: schemas, arguments, implementations and rows of ops."""

from boundary_ops.errors import BoundaryOpError


class UnreadableSchema(BoundaryOpError):
    what = "schema {schema!r} {reason}"
    rule = "an op is declared by its torch schema, and found by its name with a namespace"
    fix = 'write it as "ns::op(Tensor q, Tensor(a!) out) -> ()"'


class ReturnsResult(BoundaryOpError):
    what, expected, got = "op '{op}'", "a schema that returns nothing, '-> ()'", "'-> {returns}'"
    rule = "a boundary op writes its result into memory of its caller, whose address stays the same"
    fix = (
        "allocate the result in the model (torch.empty), pass it as 'Tensor(a!) out', write into it; "
        "for an existing op, define a small op that calls it and copies its result"
    )


class WritesNothing(BoundaryOpError):
    what = "op '{op}'"
    expected, got = "at least one argument marked as written, such as 'Tensor(a!) out'", "{schema}"
    rule = "an op that returns nothing and writes nothing is dead code in a graph"
    fix = "mark each tensor that the op writes with its own alias letter: (a!), (b!), ..."


class UnknownArgument(BoundaryOpError):
    what, expected = "op '{op}', {option}", "one of the {kind} {choices}"
    rule = "a declaration names arguments of the op's schema, of the kind that it is about"
    fix = "use the argument names of the schema"


class WrongTokenArgs(BoundaryOpError):
    what, expected = "op '{op}', token_args", "a non-empty dict of argument name -> dim, or None"
    rule = "token_args say where the token count is"
    fix = 'pass for example {{"q": 0, "out": 0}}, or leave token_args out'


class WrongTokenDim(BoundaryOpError):
    what, expected = "op '{op}', {option}", "a dim counted from the front, 0 or more{words}"
    rule = "token rows are along one dim of a tensor, or along the dims that a word stands for"
    fix = "count the dim from the front, for example 0 for [num_tokens, heads, head_dim]"


class WrongImplementation(BoundaryOpError):
    what, expected = "op '{op}', impl", "a callable, or a dict from device ({devices}) to callable"
    rule = "each device that the op runs on has an implementation"
    fix = 'pass one callable for all devices, or for example {{"cpu": f, "cuda": g}}'


class WrongCapturedForm(BoundaryOpError):
    what = "op '{op}', captured_form"
    expected = "capture_safe=True for both ops, and a form that writes {writes}"
    rule = "the form does in a graph what the op does outside of it"
    fix = "declare both capture_safe=True, and give what they write the same names"


class AmbiguousOverload(BoundaryOpError):
    what, expected, got = "op '{op}' has several overloads and no default one", "one of {overloads}", "{op}"
    rule = "an op is one overload, because overloads differ in what they take and write"
    fix = 'name the overload: "{overloads[0]}"'


class UnknownOp(BoundaryOpError):
    what = "op '{op}' does not exist in torch's dispatcher"
    expected, got = 'the name of a loaded op, "ns::op" or "ns::op.overload"', "{op!r}"
    rule = "an op is declared once it exists; `boundary_ops.define` makes new ones"
    fix = "import the library that defines the op first"


class OpExists(BoundaryOpError):
    what = "op '{op}': it exists already and was not defined here"
    rule = "`define` makes new ops"
    fix = 'declare the existing op with boundary_ops.register("{op}"), or choose another name'


class SchemaChanged(BoundaryOpError):
    what = "op '{op}' is already defined with another schema"
    rule = "an op keeps its schema for the life of the process, because graphs hold on to it"
    fix = "choose another name, or restart Python"


class NotDeclared(BoundaryOpError):
    what, expected = "op '{op}' is not declared as a boundary op", "one of {declared}"
    rule = "only a declared op can be taken back"
    fix = "boundary_ops.registered() lists the declared ops"


class NoImplementation(BoundaryOpError):
    what = "op '{op}' has no implementation for device '{device}'"
    expected, got = "tensors on one of {devices}", "{device}"
    rule = "an op runs only on the devices that it was defined for"
    fix = 'add "{device}" to the impl dict of boundary_ops.define, or move the model'


class MissingTokenDim(BoundaryOpError):
    what = "op '{op}', argument '{argument}'"
    expected = "at least {num_dims} dims, because token_args declare dim {dim}"
    rule = "the declared token dim exists in every call"
    fix = "correct token_args, or the shape that the model passes"


class WrongRowsArgument(BoundaryOpError):
    what = "declare_rows, {argument}"
    expected = '"lib::op", token_args={{name: dim}}, token_results=(dim, ...), only={{name: value}}'
    rule = "an op is declared by its name and by names of its arguments"
    fix = "correct {argument}"


class RowsOfTorchOp(BoundaryOpError):
    what, expected, got = "op '{op}'", "an op of a library", "one of torch's own"
    rule = "torch's ops have rules, or run eagerly: a declaration would not be read"
    fix = "declare an op of your own that calls it: torch.library.custom_op makes one"


class RowsOfWritingOp(BoundaryOpError):
    what, expected = "op '{op}'", "an op that writes into none of its arguments"
    rule = "rows are followed from arguments to new results"
    fix = "call a form of it that returns its result, or make it a boundary op: boundary_ops.register"


class WrongTokenResults(BoundaryOpError):
    what, expected = "op '{op}', token_results", "one for each of {count} results"
    rule = "each result carries tokens somewhere, or not at all"
    fix = "for example (0,) for one result of [num_tokens, hidden], None for a result without tokens"


class WrongPadded(BoundaryOpError):
    what, expected = "op '{op}', padded", "'real' or 'anything'"
    rule = "a padded row that equals a real one gives the real one's result, or nothing is known of it"
    fix = "leave it out for an op without state between rows"


class RowsNotDeclared(BoundaryOpError):
    what = "op '{op}': nothing was declared of its rows"
    rule = "a declaration is tested, not an op"
    fix = 'call boundary_ops.declare_rows("{op}", ...) first'


class RowsRefuted(BoundaryOpError):
    """A test has shown that an op does not treat its rows as declared."""

    what = "op '{op}', as declared by declare_rows"
    rule = "the op treats each token row alone"
    fix = "correct the declaration, or take it back by token_args=None: the op then runs eagerly"
