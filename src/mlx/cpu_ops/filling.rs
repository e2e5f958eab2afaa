//! Chunks of a prompt of which only what they leave in the caches is used.

use std::cell::Cell;

thread_local! {
    static FILLING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, in which this thread builds the graph of a chunk whose logits nobody will ask for: where they would come
/// from is not computed either.
pub fn filling_caches<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            FILLING.set(self.0);
        }
    }
    let _restore = Restore(FILLING.replace(true));
    work()
}

/// Whether a graph made now by this thread only fills caches.
pub(super) fn only_fills_caches() -> bool {
    FILLING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_filling_leaves_nothing_behind() {
        assert!(filling_caches(only_fills_caches));
        let _ = std::panic::catch_unwind(|| filling_caches(|| panic!("stop")));
        assert!(!only_fills_caches());
    }
}
