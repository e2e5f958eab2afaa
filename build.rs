//! Compiles the C++ primitive that puts our CPU kernels into MLX's graph (native/cpu_kernel.cpp).

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=native/cpu_kernel.cpp");
    let Some(include) = env::var_os("DEP_MLX_INCLUDE") else {
        println!("cargo:warning=MLX is not set up; run: python3 scripts/setup.py runtime");
        return;
    };
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").warnings(false).file("native/cpu_kernel.cpp");
    for folder in env::split_paths(&include) {
        build.flag("-isystem").flag(folder);
    }
    build.compile("mlx_bun_cpu_kernel");
}
