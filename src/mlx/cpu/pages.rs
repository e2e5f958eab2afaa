//! Large pages for memory that every token reads whole: with small ones, looking up addresses takes a fifth of the time.

use std::ops::Range;

/// The size of a large page on the processors that have them.
const LARGE: usize = 2 << 20;

/// What an allocator may keep between two arrays that lie together.
const GAP: usize = 64 << 10;

/// Asks the system to put the whole large pages within some ranges of addresses on large pages. What is there stays as
/// it is, and readable meanwhile; where the system cannot or will not, nothing happens.
pub fn prefer_large(ranges: &[Range<usize>]) {
    for range in large_parts(ranges) {
        collapse(range);
    }
}

/// Neighbours joined, cut to whole large pages.
fn large_parts(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut ranges = ranges.to_vec();
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(GAP) => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    let whole = |range: Range<usize>| range.start.next_multiple_of(LARGE)..range.end / LARGE * LARGE;
    joined.into_iter().map(whole).filter(|range| range.start < range.end).collect()
}

#[cfg(target_os = "linux")]
fn collapse(range: Range<usize>) {
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    /// Since Linux 6.1; older ones refuse it.
    const MADV_COLLAPSE: c_int = 25;

    let address = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the advice changes which physical pages are behind addresses, never what is read there; addresses that
    // are not mapped are refused.
    unsafe { madvise(address, range.len(), MADV_COLLAPSE) };
}

#[cfg(not(target_os = "linux"))]
fn collapse(_range: Range<usize>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_joined_and_cut_to_whole_pages() {
        let kb = 1 << 10;
        let parts = large_parts(&[
            5 * LARGE..6 * LARGE + kb,
            LARGE - kb..2 * LARGE - kb,
            2 * LARGE..3 * LARGE - kb,
            3 * LARGE..4 * LARGE - kb,
        ]);
        assert_eq!(parts, [LARGE..3 * LARGE, 5 * LARGE..6 * LARGE]);
        assert_eq!(large_parts(std::slice::from_ref(&(kb..LARGE + kb))), []);
    }

    #[test]
    fn what_is_in_memory_stays() {
        let memory: Vec<u64> = (0..1 << 20).collect();
        let start = memory.as_ptr() as usize;
        prefer_large(std::slice::from_ref(&(start..start + size_of_val(&memory[..]))));
        assert!(memory.iter().enumerate().all(|(index, value)| index as u64 == *value));
    }
}
