"""Write `requirements.lock` (every package of the locked environment with its hashes) and `sbom.json` (CycloneDX).

    python tools/lock.py            # asks pip, which asks its index; installs nothing

Versions come from constraints.txt. `pip install --require-hashes -r requirements.lock` then installs exactly these
files. The hashes are those of the wheels for Linux, x86-64 and arm64, and for every Python that tilewise supports; pip
is asked once for each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOCK, SBOM = ROOT / "requirements.lock", ROOT / "sbom.json"


def requirements() -> list[str]:
    """Return the dependencies of tilewise and of its server, as the pyproject.toml files name them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    arena = tomllib.loads((ROOT / "packages/tilewise-arena/pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(name for name in arena["dependencies"] if name != "tilewise")]


def report(*more: str) -> list[dict[str, Any]]:
    """Return pip's report of the packages it would install, sorted by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq", "--report", str(path)]
        command = [*pip, "--only-binary=:all:", "-c", str(ROOT / "constraints.txt"), *more]
        subprocess.run(command, check=True)
        packages: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["install"]
    return sorted(packages, key=lambda package: name_of(package))


def options_for(python: str, machine: str) -> list[str]:
    """Return the options that ask pip for the wheels of another Python on another kind of machine."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 40)] + [f"manylinux2014_{machine}", "any"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    return ["--target", "nowhere", "--python-version", python, *platforms]


def resolve() -> list[dict[str, Any]]:
    """List the packages that this Python would install, each with the hashes of its wheels for all Pythons."""
    packages = report(*requirements())
    pinned = [f"{name_of(p)}=={p['metadata']['version']}" for p in packages]
    hashes: dict[str, set[str]] = {name_of(p): {hash_of(p)} for p in packages}
    for python in PYTHONS:
        for machine in ("x86_64", "aarch64"):
            for package in report("--no-deps", *options_for(python, machine), *pinned):
                hashes[name_of(package)].add(hash_of(package))
    return [package | {"hashes": sorted(hashes[name_of(package)])} for package in packages]


def name_of(package: dict[str, Any]) -> str:
    return re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()


def hash_of(package: dict[str, Any]) -> str:
    return str(package["download_info"]["archive_info"]["hashes"]["sha256"])


def lock(packages: list[dict[str, Any]]) -> str:
    lines = [
        " ".join([f"{name_of(p)}=={p['metadata']['version']}", *(f"--hash=sha256:{one}" for one in p["hashes"])])
        for p in packages
    ]
    return "\n".join(["# Written by tools/lock.py.", *lines]) + "\n"


def sbom(packages: list[dict[str, Any]]) -> str:
    """Return a CycloneDX bill of materials; the same packages give the same bytes."""
    from tilewise import __version__

    root = {
        "type": "library",
        "name": "tilewise",
        "version": __version__,
        "bom-ref": f"pkg:pypi/tilewise@{__version__}",
    }
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root},
        "components": [_component(package) for package in packages],
    }
    return json.dumps(body, indent=1) + "\n"


def _component(package: dict[str, Any]) -> dict[str, Any]:
    """Describe a package as a CycloneDX component."""
    name, version = name_of(package), package["metadata"]["version"]
    reference = f"pkg:pypi/{name}@{version}"
    licence = package["metadata"].get("license_expression")
    licenses = {"licenses": [{"expression": licence}]} if licence else {}
    hashes = [{"alg": "SHA-256", "content": one} for one in package["hashes"]]
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
        **licenses,
    } | {"hashes": hashes}


def main() -> None:
    packages = resolve()
    LOCK.write_text(lock(packages), encoding="utf-8")
    SBOM.write_text(sbom(packages), encoding="utf-8")
    print(f"{len(packages)} packages in {LOCK.name} and {SBOM.name}")


if __name__ == "__main__":
    main()
