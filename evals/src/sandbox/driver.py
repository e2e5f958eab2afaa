"""Runs one untrusted program: walls up first, then the program, then the verdict.

Reads {"program", "nonce", "folder", "memory", "seconds", "walls", "namespaces"} from standard input. Writes one JSON line
with the nonce to standard output, after an empty one once it is ready; a program that ends the process itself gives
none. Knows Linux and macOS; what this system lacks is left out, and the caller finds out with a program that tries to get
through.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys


def fail_if(bad, what):
    if bad:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def read_only_mounts(libc, folder):
    """Everything is read-only but a small tmpfs at `folder`; needs a mount namespace of our own."""
    MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 2, 4
    fail_if(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "private mounts")
    MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0), 32)
    fail_if(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, 32), "read-only mounts")
    path = os.fsencode(folder)
    fail_if(libc.mount(b"tmpfs", path, b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), b"size=32m,mode=700"), "tmpfs")


def readable():
    """What an interpreter needs: its own folders, the system's libraries, and sources of nothing and of noise."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isabs, sys.path)}
    folders.update(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    folders.update(("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero"))
    # An interpreter at the root of everything would let everything be read.
    return sorted(folder for folder in folders if os.path.exists(folder) and os.path.realpath(folder) != "/")


def landlock(libc, folder):
    """Files are read where Python is and in `folder`, and written there only; no TCP, no signals to other processes (Documentation/userspace-api/landlock.rst)."""
    CREATE, ADD_RULE, RESTRICT = 444, 445, 446
    version = libc.syscall(CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
    writes = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
    writes |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    every = writes | READ_FILE | READ_DIR
    words = [every, 3 if version >= 4 else 0, 3 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = ctypes.create_string_buffer(struct.pack("QQQ", *words), 24)
    ruleset = libc.syscall(CREATE, attributes, ctypes.c_size_t(size), 0)
    fail_if(ruleset < 0, "landlock")
    rules = [(folder, every), ("/dev/null", WRITE_FILE | READ_FILE)]
    rules += [(path, READ_FILE | READ_DIR) for path in readable()]
    for path, allowed in rules:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            allowed &= WRITE_FILE | READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, handle), 12)
        fail_if(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), "landlock rule")
        os.close(handle)
    fail_if(libc.syscall(RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


# Sockets; processes; signals; other processes' memory, limits, priorities and processors; memory and messages that
# outlive a process; mounts and namespaces; kernel interfaces of a wide surface; changes to files that are no writes. The same order in both columns is not needed.
SHARED = [424, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 442, 452, 463, 465]
DENIED = {
    "x86_64": (0xC000003E, 56, [
        41, 42, 43, 44, 46, 49, 50, 53, 288, 307,
        57, 58, 59, 322,
        62, 129, 200, 234, 297,
        101, 310, 311, 312, 302, 203, 141, 142, 144, 251, 314, 256, 279,
        29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 319,
        155, 165, 166, 161, 272, 308,
        169, 170, 171, 175, 176, 246, 248, 249, 250, 298, 304, 313, 320, 321, 323,
        90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280,
    ]),
    "aarch64": (0xC00000B7, 220, [
        198, 199, 200, 201, 202, 203, 206, 211, 242, 269,
        221, 281,
        129, 130, 131, 138, 240,
        117, 270, 271, 272, 261, 122, 140, 118, 119, 30, 274, 238, 239,
        194, 195, 196, 190, 191, 192, 193, 186, 187, 188, 189, 180, 181, 279,
        39, 40, 41, 51, 97, 268,
        104, 105, 106, 142, 161, 162, 217, 218, 219, 241, 265, 273, 280, 282, 294,
        5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88,
    ]),
}


def seccomp(libc):
    """Denies system calls by number; threads may be made, processes not."""
    known = DENIED.get(platform.machine())
    if known is None:
        return
    arch, clone, denied = known
    CLONE3, CLONE_THREAD = 435, 0x10000
    ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
    LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    # The x32 numbers of the same calls.
    code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # libc then tries `clone`, whose flags can be seen.
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += [(EQUAL, 0, 4, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW)]
    code += [(RETURN, 0, 0, ERRNO | errno.EPERM)]
    for number in sorted({*SHARED, *denied}):
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    code += [(RETURN, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters))
    PR_SET_SECCOMP, FILTER = 22, 2
    fail_if(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.create_string_buffer(program, 16), 0, 0), "seccomp")


def limits(memory, seconds):
    for name, value in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_CPU", seconds + 1),
        ("RLIMIT_FSIZE", 16 << 20),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            # macOS refuses a limit of the address space.
            if not (sys.platform == "darwin" and name == "RLIMIT_AS"):
                raise


def main():
    config = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # The clock starts here: an interpreter may be slow to come up.
    os.write(answer, b"\n")
    verdict = {"nonce": config["nonce"], "passed": False}
    try:
        # Compiled before the walls: the limits are for what the program does.
        program = compile(config["program"], "<program>", "exec")
    except BaseException as error:
        verdict["why"] = f"{type(error).__name__}: {error}"[:300]
    else:
        try:
            if config["walls"] and sys.platform == "linux":
                libc = ctypes.CDLL(None, use_errno=True)
                if config["namespaces"]:
                    read_only_mounts(libc, config["folder"])
                PR_SET_NO_NEW_PRIVS = 38
                fail_if(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
                landlock(libc, config["folder"])
                os.chdir(config["folder"])
                limits(config["memory"], config["seconds"])
                seccomp(libc)
            else:
                os.chdir(config["folder"])
                limits(config["memory"], config["seconds"])
        except Exception as error:
            verdict["broken"] = f"{type(error).__name__}: {error}"[:300]
        else:
            # Ends a program that only waits when nobody is left to end it.
            signal.alarm(config["seconds"] + 2)
            try:
                exec(program, {})
                verdict["passed"] = True
            except BaseException as error:
                try:
                    verdict["why"] = f"{type(error).__name__}: {error}"[:300]
                except BaseException:
                    verdict["why"] = "an error that cannot be shown"
    # ASCII, so that no text of the program can break it.
    os.write(answer, (json.dumps(verdict) + "\n").encode())
    os._exit(0)


main()
