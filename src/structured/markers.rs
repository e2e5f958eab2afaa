//! Finds the first of several markers in text that comes in pieces.

/// Text of which it is not known yet whether it begins a marker.
#[derive(Debug, Clone, Default)]
pub(super) struct MarkerScanner {
    held: String,
    /// Bytes of `held` that end no marker.
    scanned: usize,
}

impl MarkerScanner {
    /// Adds text.
    pub(super) fn push(&mut self, text: &str) {
        self.held.push_str(text);
    }

    /// All text that was neither found nor released.
    pub(super) fn held(&self) -> &str {
        &self.held
    }

    /// The text before the first marker to be complete, and that marker's index; both are consumed. Of markers that
    /// end at the same place the longest counts, as in mlx-lm's `TextStateMachine` (generate.py).
    pub(super) fn find(&mut self, markers: &[&str]) -> Option<(String, usize)> {
        let bytes = self.held.as_bytes();
        for end in self.scanned + 1..=bytes.len() {
            let ending = bytes.get(..end)?;
            let complete = markers
                .iter()
                .enumerate()
                .filter(|(_, marker)| !marker.is_empty() && ending.ends_with(marker.as_bytes()))
                .max_by_key(|(_, marker)| marker.len());
            if let Some((index, marker)) = complete {
                let rest = self.held.split_off(end);
                let mut before = std::mem::replace(&mut self.held, rest);
                before.truncate(end - marker.len());
                self.scanned = 0;
                return Some((before, index));
            }
        }
        self.scanned = bytes.len();
        None
    }

    /// Consumes the text that can belong to no marker.
    pub(super) fn release(&mut self, markers: &[&str]) -> String {
        let undecided = self
            .held
            .char_indices()
            .map(|(start, _)| start)
            .find(|&start| {
                markers.iter().any(|marker| marker.as_bytes().starts_with(&self.held.as_bytes()[start..]))
            })
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(undecided);
        self.scanned = rest.len();
        std::mem::replace(&mut self.held, rest)
    }

    /// Consumes everything.
    pub(super) fn take(&mut self) -> String {
        self.scanned = 0;
        std::mem::take(&mut self.held)
    }
}
