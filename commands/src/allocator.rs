//! The allocator of the whole program.

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
