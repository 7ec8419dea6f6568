"""Lines of code as they stand in a forward pass, each with why a capture refuses it, or "". Refuses to run any."""

from __future__ import annotations

VALUE, WAIT, SHAPE, BRANCH, PRINT = (
    "a value is copied to the host",
    "the host waits for the device",
    "the shape of the result depends on values",
    "Python branches on a tensor",
    "a tensor is printed",
)
ILLEGAL = (VALUE, WAIT, SHAPE, BRANCH, PRINT)

#: (line, reason). `hidden` and `logits` are tensors on the GPU, `n` and `limit` Python numbers.
LINES: tuple[tuple[str, str], ...] = (
    ("longest = hidden.max().item()", VALUE),
    ("best = logits.argmax().tolist()", VALUE),
    ("copy = logits.cpu()", VALUE),
    ("torch.cuda.synchronize()", WAIT),
    ("stream.synchronize()", WAIT),
    ("rows = hidden.nonzero()", SHAPE),
    ("found = logits.nonzero()", SHAPE),
    ("if hidden.isnan().any():", BRANCH),
    ("if logits.max() > limit:", BRANCH),
    ("print(logits)", PRINT),
    ("print(hidden.sum())", PRINT),
    ("hidden = hidden @ weight", ""),
    ("logits.copy_(hidden)", ""),
    ("hidden = torch.relu(hidden)", ""),
    ("out = torch.zeros(n)", ""),
    ("if n > limit:", ""),
    ("print(n)", ""),
    ("if hidden.shape[0] > n:", ""),
    ("print(logits.shape)", ""),
    ("hidden = hidden * 2  # never .item() here", ""),
    ("n = limit  # print(logits) once it works", ""),
    ("logits = hidden[:n]", ""),
)

#: What a reader of the table sees beside a line that is allowed.
ALLOWED = {
    "out = torch.zeros(n)": "allowed: memory comes from the graphs' pool; n is baked in",
    "if n > limit:": "allowed, and frozen: replays take the branch that the capture took",
    "if hidden.shape[0] > n:": "allowed, and frozen: the shape is the captured size for ever",
    "print(n)": "allowed; it prints at capture, and never at a replay",
    "print(logits.shape)": "allowed; it prints at capture, and never at a replay",
    "logits = hidden[:n]": "allowed: a view; n is baked in",
}


def illegal_lines(lines: list[str], tensors: list[str]) -> list[int]:
    """Numbers, from 1, of the lines in which the host needs what the device has not computed yet."""
    waits = (".item()", ".tolist()", ".cpu()", ".nonzero()", "synchronize()")
    found = []
    for number, line in enumerate(lines, 1):
        code = line.partition("#")[0]
        value = any(name in code.replace(f"{name}.shape", "") for name in tensors)
        if any(call in code for call in waits) or (code.startswith(("if ", "print(")) and value):
            found.append(number)
    return found
