//! Allocations whose failure somebody handles. A program may end when memory is full, but not while these are made.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs `work`, which handles an allocation that fails.
pub fn fallibly<R>(work: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            shift(-1);
        }
    }
    shift(1);
    let _leave = Leave;
    work()
}

/// Begins (1) or ends (-1) such work, for code in another language; the two come in pairs.
pub fn shift(step: i32) {
    DEPTH.set(DEPTH.get().saturating_add_signed(step));
}

/// Whether this thread handles an allocation that fails now. Allocates nothing.
pub fn is_fallible() -> bool {
    DEPTH.get() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_work_is_fallible_also_after_a_panic() {
        assert!(!is_fallible());
        assert!(fallibly(|| fallibly(is_fallible) && is_fallible()));
        let _ = std::panic::catch_unwind(|| fallibly(|| panic!("stop")));
        assert!(!is_fallible());
    }
}
