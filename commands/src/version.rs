//! `--version`: the program's version, MLX's, and which build of MLX is loaded. Asks nothing of a device.

use std::fs;

use crate::recorder;

/// What follows the program's name.
pub fn long() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = library(&maps).map(|path| format!(" ({path})")).unwrap_or_default();
    let commit = recorder::commit().map(|commit| format!("\ncommit {commit}")).unwrap_or_default();
    format!(
        "{}\nMLX {}{path}\nbackend {}{commit}",
        env!("CARGO_PKG_VERSION"),
        mlx_bun::mlx::version(),
        backend_of(&maps)
    )
}

/// The libmlx that this process runs on, from its memory map; there is none where it is linked in.
fn library(maps: &str) -> Option<&str> {
    files(maps).find(|path| name(path).starts_with("libmlx."))
}

/// Which build of MLX this process runs on: `cpu`, `cuda` or `metal`.
pub fn backend() -> &'static str {
    backend_of(&fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

/// Only MLX's CUDA build brings NVIDIA's libraries with it.
fn backend_of(maps: &str) -> &'static str {
    let cuda = ["libcuda.", "libcudart.", "libcublas", "libcudnn", "libnvrtc"];
    if cfg!(target_os = "macos") {
        "metal"
    } else if files(maps).any(|path| cuda.iter().any(|start| name(path).starts_with(start))) {
        "cuda"
    } else {
        "cpu"
    }
}

/// The mapped files: what follows the five columns of a line (proc(5)).
fn files(maps: &str) -> impl Iterator<Item = &str> {
    maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]))
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0 r-xp 00000000 08:01 12   /opt/a b/lib/libmlx.so
7f1 r-xp 00000000 08:01 13   /lib/libc.so.6
7f2 rw-p 00000000 00:00 0    [stack]
";

    #[test]
    fn the_loaded_library_decides_not_the_environment() {
        assert_eq!(library(MAPS), Some("/opt/a b/lib/libmlx.so"));
        assert_eq!(backend_of(MAPS), "cpu");
        assert_eq!(backend_of(&format!("{MAPS}7f3 r-xp 00000000 08:01 14 /x/libcublasLt.so.13\n")), "cuda");
        assert_eq!((library(""), backend_of("")), (None, "cpu"));
    }

    #[test]
    fn this_process_has_a_library() {
        assert!(long().contains("libmlx.so"), "{}", long());
    }
}
