//! A stable sort by a comparison that can fail.
//!
//! The standard library's sorts may panic when the comparison is no total order, which a template can arrange.

use minijinja::Error;

/// Sorts by `less`, keeping the order of equal items; stops at the first comparison that fails.
pub(super) fn merge_sort<T: Clone>(
    items: Vec<T>,
    less: &mut dyn FnMut(&T, &T) -> Result<bool, Error>,
) -> Result<Vec<T>, Error> {
    let mut runs: Vec<Vec<T>> = items.into_iter().map(|item| vec![item]).collect();
    while runs.len() > 1 {
        let mut merged = Vec::with_capacity(runs.len().div_ceil(2));
        let mut pairs = runs.into_iter();
        while let Some(left) = pairs.next() {
            merged.push(match pairs.next() {
                Some(right) => merge(left, right, less)?,
                None => left,
            });
        }
        runs = merged;
    }
    Ok(runs.pop().unwrap_or_default())
}

fn merge<T: Clone>(
    left: Vec<T>,
    right: Vec<T>,
    less: &mut dyn FnMut(&T, &T) -> Result<bool, Error>,
) -> Result<Vec<T>, Error> {
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let mut left = left.into_iter().peekable();
    let mut right = right.into_iter().peekable();
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        let taken = if less(b, a)? { right.next() } else { left.next() };
        merged.extend(taken);
    }
    merged.extend(left);
    merged.extend(right);
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_stably() {
        let items: Vec<(u32, usize)> = [5, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5].into_iter().zip(0..).collect();
        let mut expected = items.clone();
        expected.sort_by_key(|item| item.0);
        let sorted = merge_sort(items, &mut |a, b| Ok(a.0 < b.0)).unwrap();
        assert_eq!(sorted, expected);
    }

    #[test]
    fn an_inconsistent_order_does_not_panic() {
        let sorted = merge_sort((0..1000).collect(), &mut |_, _| Ok(true)).unwrap();
        assert_eq!(sorted.len(), 1000);
    }
}
