"""schemathesis against the operator API of a real serve with simulated workers and sessions of its own.

    target/venv/bin/python tests/schemathesis/run.py [MAX_EXAMPLES] [SECONDS]

Every operation of the served document is tried with good and bad input, but the watch stream, which does not end. No
answer may be a 5xx, or of a status, type, header or form that the document does not say.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from harness.cluster import Cluster  # noqa: E402
from harness.talk import TEXT, Talk, prose, sealed_session  # noqa: E402

CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
          "response_schema_conformance,negative_data_rejection,unsupported_method")


def main() -> int:
    examples = sys.argv[1] if len(sys.argv) > 1 else "12"
    seconds = sys.argv[2] if len(sys.argv) > 2 else "90"
    with Cluster("hybrid", "hybrid", settings=(TEXT,), sim=("--speed-up", "20")) as cluster:
        for n in range(3):
            Talk(cluster.url, f"s{n}", prose(200, n + 1)).say("hello")
            sealed_session(cluster.serve, f"s{n}")
        return subprocess.run([
            str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(Path(__file__).with_name("schemathesis.toml")), "run", f"{cluster.serve.operator}/ownerserve/v1/openapi.json",
            "--url", cluster.serve.operator, "--checks", CHECKS, "--max-examples", examples, "--max-time", seconds,
            "--phases", "examples,coverage,fuzzing", "--exclude-path", "/ownerserve/v1/watch", "--seed", "1",
            "--generation-database", "none", "--no-color", "--warnings", "off",
        ], cwd=os.environ.get("TMPDIR", "/tmp"), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
