# SPDX-License-Identifier: MIT
"""Builds the package: `pip install examples/python`, `make wheel`, or by itself:

    python3 build_backend.py [FOLDER]       the package in FOLDER/kvprim (default: build/python at the top), which may
                                            be copied, and is found by PYTHONPATH=FOLDER. One that is there is
                                            replaced; any other folder of that name stays, and is an error

Needs a C and a C++ compiler, Python's headers and, for GPUs, nvcc; and, for the operators that use them, the headers of
torch 2.10 or newer (any one serves them all), of TVM-FFI (apache-tvm-ffi) and of NCCL 2.19 or newer (the collectives).
What the package is used with needs none of these, and another Python, torch or NCCL will do. Environment:

    KVPRIM_CUDA_ARCH      architectures, default "80 90 100 120", as far as nvcc knows them; "native": of the GPU here;
                          "none": for the CPU alone
    KVPRIM_TORCH_INCLUDE, KVPRIM_TVM_FFI_INCLUDE, KVPRIM_NCCL_INCLUDE    headers, if not those that this Python finds
                          or, for NCCL, those beside CUDA's; "none": without them
    NVCC, CC, CXX, CUDA_HOME, NCCL_HOME
"""
import base64
import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
HEADERS = next((folder for folder in (os.path.join(HERE, "../.."), os.path.join(HERE, "include"))
                if os.path.exists(os.path.join(folder, "kvprim.h"))), None)
ALL = "{ global: %s; local: *; };"


def run(*command):
    print(*command, flush=True)
    subprocess.run(command, check=True)


def compiler(name, default):
    return shlex.split(os.environ.get(name) or default)


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    places = [home and home + "/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc"]
    return os.environ.get("NVCC") or next((place for place in places if place and os.path.exists(place)), None)


def headers_of(package, header, *places):
    """The folder of a package's headers, or one of `places` that has them. pip hides the packages beside it from a
    build; a Python that ignores its settings finds them."""
    given = os.environ.get(f"KVPRIM_{package.rpartition('.')[2].upper()}_INCLUDE")
    code = f"import importlib.util as u; s = u.find_spec('{package}'); print(s and s.submodule_search_locations[0])"
    found = given or subprocess.run([sys.executable, "-I", "-c", code], capture_output=True,
                                    text=True).stdout.strip() + "/include"
    return next((folder for folder in (found, *(() if given else places))
                 if os.path.exists(os.path.join(folder, header))), None)


def nccl_include(nvcc):
    homes = [os.environ.get("NCCL_HOME"), os.path.dirname(os.path.dirname(nvcc)), "/usr/local", "/usr"]
    return headers_of("nvidia.nccl", "nccl.h", *(home + "/include" for home in homes if home))


def cuda_flags(nvcc):
    """Code for each architecture, and PTX of the last for those to come."""
    if os.environ.get("KVPRIM_CUDA_ARCH") == "native":
        return ["-arch=native"]
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    named = os.environ.get("KVPRIM_CUDA_ARCH", "80 90 100 120")
    wanted = [arch for arch in re.findall(r"\d+", named) if "compute_" + arch in known]
    if not wanted:
        sys.exit(f"kvprim: KVPRIM_CUDA_ARCH={named!r} names none of what {nvcc} knows: "
                 + " ".join(known).replace("compute_", ""))
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted] + [
        f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


def build_library(package, scratch):
    """libkvprim.so: the functions of kvprim.h and kvprim_cuda.cuh, which need neither Python nor torch. CUDA's runtime
    is linked in and exports nothing."""
    nvcc = None if os.environ.get("KVPRIM_CUDA_ARCH") == "none" else find_nvcc()
    source, exports = os.path.join(scratch, "kvprim.cu" if nvcc else "kvprim.c"), os.path.join(scratch, "exports")
    with open(source, "w") as file:
        file.write("#if __has_include(<xxhash.h>)\n#define XXH_INLINE_ALL\n#include <xxhash.h>\n#endif\n"  # XXH3's keys
                   f'#include "kvprim{"_cuda.cuh" if nvcc else ".h"}"\n')
    with open(exports, "w") as file:
        file.write(ALL % "kvprim_*")
    flags = ["-I" + HEADERS, "-DKVPRIM_IMPLEMENTATION", "-DKVPRIM_EXPORT", "-shared", source, "-o",
             os.path.join(package, "libkvprim.so")]
    if nvcc:
        run(nvcc, "-std=c++17", "-O3", *cuda_flags(nvcc), "-Xcompiler", "-fPIC", "-cudart", "static",
            "-Xlinker", "--version-script=" + exports, *flags)
    else:
        print("kvprim: no nvcc, so this is for the CPU alone")
        run(*compiler("CC", "cc"), "-std=c11", "-O2", "-fPIC", "-Wl,--version-script=" + exports, *flags)


def build_empty(scratch, name, *flags):
    """At run time that library is there: an empty one takes its place for the linker."""
    run(*compiler("CXX", "c++"), "-shared", "-x", "c++", "/dev/null", *flags, "-o",
        os.path.join(scratch, f"lib{name}.so"))


def build_collectives(package, scratch):
    """libkvprim_nccl.so: the functions of kvprim_nccl.h. It takes the libnccl.so.2 of the process that loads it."""
    nvcc = None if os.environ.get("KVPRIM_CUDA_ARCH") == "none" else find_nvcc()
    include = nvcc and nccl_include(nvcc)
    if not include:
        print("kvprim: no nvcc or no nccl.h, so this has no collectives: install NCCL, or set KVPRIM_NCCL_INCLUDE")
        return
    exports = os.path.join(scratch, "collectives.exports")
    with open(exports, "w") as file:
        file.write(ALL % "kvprim_*")
    build_empty(scratch, "nccl", "-Wl,-soname,libnccl.so.2")
    linker = [f"-Xlinker={option}" for option in (
        "-soname=libkvprim_nccl.so", "-rpath=$ORIGIN", "--no-as-needed", "--version-script=" + exports)]
    run(nvcc, "-std=c++17", "-O3", *cuda_flags(nvcc), "-Xcompiler", "-fPIC", "-cudart", "static", "-I" + HEADERS,
        "-I" + include, "-DKVPRIM_NCCL_IMPLEMENTATION", "-DKVPRIM_EXPORT", "-shared",
        os.path.join(HERE, "src/communicators.cu"), "-o", os.path.join(package, "libkvprim_nccl.so"), *linker,
        "-L" + package, "-lkvprim", "-L" + scratch, "-lnccl")


def build_module(package, scratch, source, output, include, exports, *flags):
    path = os.path.join(scratch, output + ".exports")
    with open(path, "w") as file:
        file.write(ALL % exports)
    run(*compiler("CXX", "c++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-I" + HEADERS,
        "-isystem", include, os.path.join(HERE, "src", source), "-o", os.path.join(package, output), "-L" + package,
        "-lkvprim", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-Wl,--version-script=" + path, *flags)


def build(package):
    """Builds the package in this folder."""
    if HEADERS is None:
        sys.exit(f"kvprim: no kvprim.h in {HERE}/../.. or {HERE}/include")
    built = [os.path.join(package, name) for name in ("__init__.py", "include/kvprim.h")]
    if os.path.exists(package) and os.listdir(package) and not all(map(os.path.exists, built)):
        sys.exit(f"kvprim: {package} is there, but no package that this has built: move it, or name another folder")
    if os.environ.get("KVPRIM_CUDA_ARCH") != "none" and find_nvcc():
        cuda_flags(find_nvcc())  # if these are wrong, the package of before stays
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(os.path.join(HERE, "kvprim"), package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, _, _ in os.walk(package):
        os.chmod(folder, 0o755)  # the sources may be read-only
    os.makedirs(os.path.join(package, "include"))
    for name in ("kvprim.h", "kvprim_cuda.cuh", "kvprim_nccl.h"):
        shutil.copy(os.path.join(HEADERS, name), os.path.join(package, "include"))
    with tempfile.TemporaryDirectory() as scratch:
        build_library(package, scratch)
        build_collectives(package, scratch)
        build_module(package, scratch, "python_module.cpp", "_eager.abi3.so", sysconfig.get_path("include"), "PyInit_*")
        for name, header, source, output, exports, flags in (
                ("torch", "torch/csrc/stable/library.h", "torch_operators.cpp", "libkvprim_torch.so",
                 "kvprim_torch_describe", ["-DTORCH_TARGET_VERSION=0x020a000000000000"]),
                ("tvm_ffi", "tvm/ffi/function.h", "ffi_module.cpp", "libkvprim_tvm_ffi.so", "__tvm_ffi_*", [])):
            include = headers_of(name, header)
            if include is None:
                print(f"kvprim: no headers of {name}, so this has no {output}: install {name}, or set "
                      f"KVPRIM_{name.upper()}_INCLUDE, and build again")
                continue
            build_empty(scratch, name, f"-Wl,-soname,lib{name}.so")
            build_module(package, scratch, source, output, include, exports, *flags, "-L" + scratch, "-l" + name)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with open(os.path.join(HEADERS, "kvprim.h")) as file:
        version = ".".join(re.search(rf"KVPRIM_VERSION_{part}\s+(\d+)", text).group(1)
                           for text in [file.read()] for part in ("MAJOR", "MINOR", "PATCH"))
    tag = "cp310-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
    info, name, record = f"kvprim-{version}.dist-info", f"kvprim-{version}-{tag}.whl", []
    with tempfile.TemporaryDirectory() as scratch:
        build(os.path.join(scratch, "kvprim"))
        made = os.path.join(scratch, name)  # only a whole one gets to where wheels are looked for
        wheel = zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED)

        def add(path, data):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}\n")
            wheel.writestr(path, data)

        for path in sorted(glob.glob(os.path.join(scratch, "kvprim/**"), recursive=True)):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    add(os.path.relpath(path, scratch), file.read())
        add(info + "/METADATA", f"Metadata-Version: 2.1\nName: kvprim\nVersion: {version}\n"
                                "Requires-Python: >=3.10\nLicense: MIT\n".encode())
        add(info + "/WHEEL", f"Wheel-Version: 1.0\nGenerator: kvprim\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
        wheel.writestr(info + "/RECORD", "".join(record) + f"{info}/RECORD,,\n")
        wheel.close()
        shutil.move(made, os.path.join(wheel_directory, name))
    return name


if __name__ == "__main__":
    build(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../../build/python"), "kvprim"))
