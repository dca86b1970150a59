"""Products with an epilogue in CUDA, for tensor cores of Hopper."""

from __future__ import annotations

from fusegen.emit.cuda.assemble import assemble, math_text
from fusegen.emit.cuda.lanes import Place, Wrapper, operand_parts, operands_text, wrapper_text
from fusegen.emit.environment import render
from fusegen.emit.views import entry
from fusegen.schedule.kernel import ContractionBody, Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

_DOC = "Finishes two neighbouring columns of a row."


def emit_contraction(kernel: Kernel, launch: Launch, target: Target) -> Source:
    """The source of a product with its epilogue."""
    body = kernel.body
    assert isinstance(body, ContractionBody)
    fields, parameters, values = operand_parts(kernel, "i64")
    output = body.output_dtype.spelling
    rows = tuple(symbol.name for symbol in body.epilogue.axes.symbols[:-1])
    place = Place(rows, "col", "i64", merged="row")
    wrapper = Wrapper("epilogue", _DOC, ("const float (&product)[2]",), place, ("out", output))
    math = [operands_text(fields), math_text([body.epilogue.function]), wrapper_text(kernel, body.epilogue, wrapper)]
    pipeline = render(
        "cuda/contraction.cu.jinja",
        entry=entry(kernel),
        input_type=body.input_dtype.spelling,
        output_type=output,
        operand_parameters=parameters,
        operand_arguments=values,
        plan=body.plan,
    )
    return assemble(kernel, target, launch.group.kind.value, "\n".join(math), pipeline)
