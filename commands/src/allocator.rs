//! The allocator of the whole program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mlx_bun::mlx::cpu::allocation;

use crate::exit::ExitStatus;

/// MLX frees on its own thread what this one allocated; the system's allocator makes the two wait for each other.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The number of `mi_option_purge_delay` in mimalloc's header.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// For work whose memory counts more than the time that the system takes to hand it out: what is freed goes back at
/// once, and memory comes in small pages, of which less lies idle than of huge ones.
pub fn keep_little() {
    // SAFETY: an option of the allocator may be set at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) };
    #[cfg(target_os = "linux")]
    {
        let (on, unused): (libc::c_ulong, libc::c_ulong) = (1, 0);
        // SAFETY: changes nothing but how the system backs what is allocated from here on. It may refuse.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, on, unused, unused, unused) };
    }
}

/// Gives what this thread has freed back to the system, so that what is resident is what is in use.
pub fn give_back() {
    // SAFETY: takes no pointers, and touches nothing that is in use.
    unsafe { libmimalloc_sys::mi_collect(true) };
}

/// The number by which a full memory is reported, and that of a size beyond all memory.
const FULL: [libc::c_int; 2] = [libc::ENOMEM, libc::EOVERFLOW];

/// Ends the program with an error when there is no memory left, on any thread and for MLX's allocations too, which does
/// not look whether it got any. What is asked for [`fallibly`](allocation::fallibly) is for the caller to handle.
pub fn end_when_full() {
    // SAFETY: the function lives for ever and needs no argument.
    unsafe { libmimalloc_sys::mi_register_error(Some(report), std::ptr::null_mut()) };
}

unsafe extern "C" fn report(code: libc::c_int, _: *mut std::ffi::c_void) {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    const MESSAGE: &[u8] =
        b"error: there is not enough memory; take a smaller model or a shorter context, or raise the limit (ulimit -v)\n";
    if !FULL.contains(&code) || allocation::is_fallible() {
        return;
    }
    // The first to come speaks; another, or itself while it tidies up, waits for it to be done and ends all.
    if BEGUN.swap(true, Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(100));
    } else {
        // SAFETY: plain bytes; nothing is allocated.
        unsafe { libc::write(2, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
        crate::compiled::settle(false);
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(ExitStatus::Failure.code())) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_the_option_is_right() {
        // SAFETY: options may be read and set at any time.
        unsafe {
            // Its default in milliseconds, which no other option has.
            assert_eq!(libmimalloc_sys::mi_option_get(PURGE_DELAY), 1000);
            keep_little();
            assert_eq!(libmimalloc_sys::mi_option_get(PURGE_DELAY), 0);
        }
    }
}
