//! Chunks of a prompt of which only what they leave in the caches is used.

use std::cell::Cell;

thread_local! {
    static FOLLOWING: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs `work`, in which this thread builds the graph of a chunk whose logits nobody will ask for: where they would come
/// from is not computed either. Caches make room at once for the positions of the prompt that are `following`.
pub fn filling_caches<R>(following: usize, work: impl FnOnce() -> R) -> R {
    struct Restore(Option<usize>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FOLLOWING.set(self.0);
        }
    }
    let _restore = Restore(FOLLOWING.replace(Some(following)));
    work()
}

/// Whether a graph made now by this thread only fills caches.
pub(super) fn only_fills_caches() -> bool {
    FOLLOWING.get().is_some()
}

/// Positions that are known to come after the step that this thread makes now.
pub fn positions_to_follow() -> usize {
    FOLLOWING.get().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_filling_leaves_nothing_behind() {
        assert_eq!(filling_caches(7, || (only_fills_caches(), positions_to_follow())), (true, 7));
        let _ = std::panic::catch_unwind(|| filling_caches(7, || panic!("stop")));
        assert_eq!((only_fills_caches(), positions_to_follow()), (false, 0));
    }
}
