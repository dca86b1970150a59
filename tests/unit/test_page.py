"""The page of a lowered kernel: complete, safe, small, and each line of the user connected with the emitted lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.jit import nvrtc
from fusegen.source import Source, strip_comments
from fusegen.units import human_bytes
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.lowering import lowered, meta

_VOID = ("meta", "link")
_LARGEST = 1_500_000  # bytes


@dataclass
class Element:
    """An element with the text inside of it."""

    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """The elements of a page; checks that tags match."""

    source: str
    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(
            tag, {name: value or "" for name, value in attrs}, tuple(e.attributes.get("class", "") for e in self.open)
        )
        self.elements.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def connected(self, pane: str) -> dict[str, set[str]]:
        """Maps the text of each connected element in a pane to the keys that it shares."""
        keys: dict[str, set[str]] = {}
        for element in self.elements:
            if "data-l" in element.attributes and any(pane in names.split() for names in element.inside):
                keys.setdefault(element.text, set()).update(element.attributes["data-l"].split())
        return keys

    def beside(self, line: str) -> str:
        """The emitted lines that light up with a line of the user."""
        (keys,) = [keys for text, keys in self.connected("yours").items() if f" {line}" in text]
        return "".join(text for text, own in self.connected("emitted").items() if own & keys)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    hidden = F.gelu(x @ weight)
    return hidden * hidden.float().square().mean(-1, keepdim=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True)
    normed = wide * (scale + 1e-6).rsqrt()
    return normed.to(x.dtype) * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = x @ weight
    shifted = hidden + bias
    return F.gelu(shifted, approximate="tanh")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.125
    weights = scores.softmax(-1)
    return weights @ v


def inlined(x: Tensor) -> Tensor:
    y = x * 2
    z = y + 1
    return z.exp()


CASES: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
    gated: (meta(64, 512), meta(512, 512)),
    norm: (meta(64, 512), meta(512)),
    linear: (meta(64, 512), meta(512, 512), meta(512)),
    attention: (meta(2, 4, 128, 64), meta(2, 4, 128, 64), meta(2, 4, 128, 64)),
    inlined: (meta(64, 512),),
}


def page(function: Callable[..., Tensor], target: str = "sm_90a") -> Page:
    return Page(lowered(function, *CASES[function], target=target).html())


@pytest.mark.parametrize("target", ["sm_90a", "cpu"])
def test_a_page_loads_nothing(target: str) -> None:
    found = page(gated, target)
    assert {"img", "iframe", "object", "embed"}.isdisjoint(element.tag for element in found.elements)
    addresses = [e.attributes[name] for e in found.elements for name in ("src", "href", "srcset") if name in e.attributes]
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    (policy,) = [e.attributes["content"] for e in found.elements if "http-equiv" in e.attributes]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "cpu"])
def test_each_line_with_operations_lights_up_emitted_lines(target: str) -> None:
    for function in CASES:
        with case(function.__name__):
            found = page(function, target)
            lines, emitted = found.connected("yours"), found.connected("emitted")
            assert len(lines) == _lines_of(function)
            assert all(any(keys & own for own in emitted.values()) for keys in lines.values())


def _lines_of(function: Callable[..., Tensor]) -> int:
    return len({line for _, _, line in function.__code__.co_lines() if line is not None}) - 1  # without the signature


def test_a_line_lights_up_the_lines_that_compute_it() -> None:
    assert "rsqrt" in page(norm).beside("normed = wide")
    assert "mma_" in page(linear).beside("hidden = x @ weight")
    assert "+ bias" in page(linear).beside("shifted = hidden")
    assert "fast_exp2" in page(attention).beside("weights = scores")
    assert "exp" in page(inlined).beside("y = x * 2")


def test_instructions_light_up_with_the_line_that_they_compute() -> None:
    for function, line, instruction in (
        (norm, "normed = wide", "MUFU.RSQ"),
        (linear, "hidden = x @ weight", "MMA"),
        (attention, "weights = scores", "MUFU.EX2"),
    ):
        with case(function.__name__):
            text = lowered(function, *CASES[function]).html(sass=True)
            found, machine = Page(text), Page(text).connected("machine")
            (keys,) = (keys for shown, keys in found.connected("yours").items() if line in shown)
            assert any(instruction in shown and keys & own for shown, own in machine.items())
            assert len(text) <= _LARGEST


def test_registers_spills_and_shared_memory_are_shown_with_the_machine_code() -> None:
    (source,) = lowered(norm, *CASES[norm]).sources
    found = nvrtc.resources(nvrtc.compile_cubin(source, "sm_90a").cubin)
    assert 16 <= found.registers <= 255 and found.local_bytes == 0
    text = lowered(norm, *CASES[norm]).html(sass=True)
    assert f"{found.registers} registers per thread, no spills, " in text


def test_spilled_registers_are_found() -> None:
    math = 'extern "C" __global__ void __maxnreg__(24) many(float* x) {\n    float v[64];\n'
    loop = "#pragma unroll\n    for (int i = 0; i < 64; ++i)"
    body = f"    {loop} v[i] = x[i];\n    __syncthreads();\n    {loop} x[i * 3] = v[63 - i] * v[i];\n}}\n"
    source = Source("many", "many", "cuda", "// many", (), math, body)
    found = nvrtc.resources(nvrtc.compile_cubin(source, "sm_90a").cubin)
    assert found.registers <= 24 and found.local_bytes > 0 and "local memory" in found.description


def test_machine_code_in_the_cache_belongs_to_lines_below_other_comments() -> None:
    (source,) = lowered(norm, *CASES[norm]).sources
    longer = replace(source, banner=f"// one line more\n{source.banner}")
    first, second = (nvrtc.instructions(each, "sm_90a") for each in (source, longer))
    assert [[line + 1 for line in each.lines] for each in first] == [list(each.lines) for each in second]


def test_a_processor_has_no_machine_code_on_its_page() -> None:
    with pytest.raises(ArgumentError, match="cpu has no SASS"):
        lowered(norm, *CASES[norm], target="cpu").html(sass=True)


def test_a_line_of_a_library_matmul_lights_up_its_step() -> None:
    assert page(gated, "cpu").beside("hidden = F.gelu(x @ weight)").startswith("torch.matmul (library): ")


def test_operations_in_the_graph_light_up_with_their_line() -> None:
    found = page(linear)
    (keys,) = [keys for text, keys in found.connected("yours").items() if " shifted = " in text]
    drawn = [e.text for e in found.elements if e.tag == "g" and keys & set(e.attributes.get("data-l", "").split())]
    assert len(drawn) == 1 and "add → bf16[x_dim0, 512]" in drawn[0]


def test_a_page_has_the_whole_text_of_the_kernels() -> None:
    low = lowered(gated, *CASES[gated])
    emitted = [e for e in Page(low.html()).elements if e.tag == "pre" and any("emitted" in names for names in e.inside)]
    shown = "\n".join(element.text for element in emitted)
    assert strip_comments(shown) == strip_comments("\n".join(source.kernel_text for source in low.sources))


def test_values_in_memory_have_their_bytes() -> None:
    drawn = [e.text for e in page(gated).elements if e.tag == "g" and e.attributes["class"] == "value"]
    assert any(text.startswith("hidden: bf16[x_dim0, 512], 64.0 KiB in memory") for text in drawn)
    assert len(drawn) == len(("x", "weight", "hidden", "result"))


def test_a_copy_is_drawn_between_its_input_and_its_result() -> None:
    def merged(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    found = Page(lowered(merged, meta(2, 4, 64, 32)).html())
    assert [e.text.partition(":")[0] for e in found.elements if e.attributes.get("class") == "edge memory"] == ["x", "result"]
    assert "merged" in found.beside("return x.transpose")


def test_traffic_is_that_of_explain_beside_eager() -> None:
    low = lowered(gated, *CASES[gated])
    bars = [e.text for e in Page(low.html()).elements if "bar" in e.attributes.get("class", "").split()]
    moved = [step.traffic.moved(low.sizes) for step in low.program.steps]
    assert [bar for bar in bars if bar.startswith("fused")] == [
        f"fused {human_bytes(sum(moved))} · 2 launches",
        *(f"fused {human_bytes(bytes_)} · 1 launch" for bytes_ in moved),
    ]
    # mm, gelu; float, square, mean, mul
    assert [bar.rpartition(" · ")[2] for bar in bars if bar.startswith("eager")] == ["6 launches", "2 launches", "4 launches"]


def test_each_step_of_a_line_that_runs_twice_has_its_own_operations_of_eager() -> None:
    def twice(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        return norm(norm(x, gain) @ weight, gain)

    text = Page(lowered(twice, meta(64, 512), meta(512), meta(512, 512)).html())
    bars = [e.text for e in text.elements if "bar" in e.attributes.get("class", "").split()]
    launches = [bar.rpartition(" · ")[2] for bar in bars if bar.startswith("eager")]
    assert launches == ["17 launches", "8 launches", "1 launch", "8 launches"]


def test_a_page_without_eager_says_so() -> None:
    low = fg.kernel(gated).backward.lower(*CASES[gated], target="sm_90a")
    assert "Those of torch eager are unknown" in low.html()


def test_candidates_are_sorted_by_expected_time() -> None:
    (listed,) = [e for e in page(norm).elements if e.attributes.get("class") == "candidates"]
    times = [float(part.split()[-1]) for part in listed.text.split(" µs")[:-1]]
    assert len(times) > 1 and times == sorted(times)
    assert listed.text.count("chosen") == 1
    assert f" candidates rated, {len(times)} shown, by expected time" in lowered(norm, *CASES[norm]).html()


def test_text_of_the_user_is_escaped() -> None:
    def strange(x: Tensor) -> Tensor:
        return x + len("</script><img src=x onerror=alert(1)>")

    text = lowered(strange, meta(8, 64), target="cpu").html()
    assert "<img" not in text and text.count("</script>") == 1
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text


def test_hostile_names_are_escaped() -> None:
    def strange(x: Tensor) -> Tensor:
        return x + 1

    strange.__name__ = strange.__qualname__ = '"></title><img src=x onerror=alert(1)>'
    strange.__code__ = strange.__code__.replace(co_name=strange.__name__, co_qualname=strange.__name__)
    text = lowered(strange, meta(8, 64), target="cpu").html()
    assert "<img" not in text and Page(text).elements


def test_code_without_source_has_none() -> None:
    scope = {"torch": torch}
    exec("def made(x):\n    return torch.exp(x) + 1\n", scope)
    text = lowered(scope["made"], meta(8, 64), target="cpu").html()
    assert "The declaration has no source." in text


def test_a_long_graph_stays_small() -> None:
    def long(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.sin(x @ weight) + x
        return x

    low = lowered(long, meta(64, 64), *[meta(64, 64)] * 60, target="cpu")
    text = low.html()
    assert len(text.encode()) < _LARGEST
    assert 10 < sum(e.tag == "g" for e in Page(text).elements) < 400
    assert "All operations of a kernel share a box. The first " in text


def test_loops_show_the_kernels_of_their_bodies() -> None:
    def cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.t()).float(), target)

    low = lowered(cross_entropy, meta(8192, 512), meta(65536, 512), meta(8192, dtype=torch.int64))
    found = Page(low.html())
    assert any(": loop over blocks of " in e.text for e in found.elements if e.tag == "h3")
    assert all(source.entry in low.html() for source in low.sources)


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    low = lowered(norm, *CASES[norm])
    (frame,) = Page(low._repr_html_()).elements
    assert frame.tag == "iframe" and frame.attributes["sandbox"] == "allow-scripts"
    assert frame.attributes["srcdoc"] == low.html()


# ``fusegen show --html``.


@pytest.mark.parametrize("target", ["sm_90a", "cpu"])
def test_show_writes_a_page(run: Run, target: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    result = run("show", "rms_norm", "--target", target, "--html", str(path), "--json")
    assert result.code == 0 and json.loads(result.out)["html"] == str(path)
    assert Page(path.read_text(encoding="utf-8")).connected("yours")


def test_show_adds_machine_code(run: Run, tmp_path: Path) -> None:
    assert run("show", "rms_norm", "--target", "sm_90a", "--sass", "--html", str(tmp_path / "page.html")).code == 0
    assert Page((tmp_path / "page.html").read_text(encoding="utf-8")).connected("machine")
    refused = run("show", "rms_norm", "--target", "sm_90a", "--sass")
    assert refused.code == 2 and "--html FILE --sass" in refused.err


def test_show_replaces_a_page_and_no_other_file(run: Run, tmp_path: Path) -> None:
    page, link, other = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "thesis.html"
    link.symlink_to(page)
    other.write_text("<!DOCTYPE html>\n<title>Thesis</title>")
    for file in (page, link, page):
        assert run("show", "gelu", "--target", "cpu", "--html", str(file)).code == 0 and "gelu" in page.read_text(encoding="utf-8")
    assert link.is_symlink()
    refused = run("show", "gelu", "--target", "cpu", "--html", str(other))
    assert refused.code == 2 and f"--html would replace {other}" in refused.err and "Thesis" in other.read_text()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_show_replaces_no_pipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = run("show", "gelu", "--target", "cpu", "--html", str(tmp_path / "pipe"))
    assert refused.code == 2 and "Not a regular file" in refused.err and (tmp_path / "pipe").is_fifo()


def test_show_says_that_it_cannot_write(run: Run, tmp_path: Path) -> None:
    result = run("show", "rms_norm", "--target", "cpu", "--html", str(tmp_path))
    assert result.code == 2
    assert f"cannot write {tmp_path}: Is a directory" in result.err and "--html" in result.err
