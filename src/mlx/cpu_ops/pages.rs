//! Huge pages for weights: a token reads all of them once, in which a page of 4 KB is a step every 150 nanoseconds.

use std::ops::Range;

/// Most bytes that are moved to huge pages at once; what is beyond is left to the system, in its own time.
const MOST: usize = 1 << 30;

/// Asks the system to back memory that is read again and again by huge pages. It may refuse, as it does for mapped
/// files; nothing but speed depends on it.
#[cfg(target_os = "linux")]
pub(super) fn advise(mut ranges: Vec<Range<usize>>) {
    unsafe extern "C" {
        fn madvise(start: *mut std::ffi::c_void, length: usize, advice: i32) -> i32;
    }
    const HUGEPAGE: i32 = 14;
    const COLLAPSE: i32 = 25;
    const SIZE: usize = 2 << 20;
    const NEAR: usize = 128 << 10;
    ranges.sort_by_key(|range| range.start);
    let mut whole: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        // Matrices are much smaller than a page; what lies in between is the allocator's.
        match whole.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(NEAR) => last.end = last.end.max(range.end),
            _ => whole.push(range),
        }
    }
    let mut moved = 0;
    for range in whole {
        let (start, end) = (range.start.next_multiple_of(SIZE), range.end / SIZE * SIZE);
        if start >= end {
            continue;
        }
        let (start, length) = (std::ptr::without_provenance_mut(start), end - start);
        // SAFETY: neither advice changes what the memory holds; addresses that do not fit are refused.
        unsafe {
            if madvise(start, length, HUGEPAGE) == 0 && moved < MOST {
                moved += length;
                madvise(start, length, COLLAPSE);
            }
        }
    }
}

/// There is no such advice elsewhere.
#[cfg(not(target_os = "linux"))]
pub(super) fn advise(_ranges: Vec<Range<usize>>) {}
