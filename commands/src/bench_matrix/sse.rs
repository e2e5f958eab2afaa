//! Server-sent events, line by line (WHATWG HTML, 9.2.6, as far as streams of models use it).

/// Collects the lines of one event after the other.
#[derive(Debug, Default)]
pub struct Events {
    data: Option<String>,
}

impl Events {
    /// Takes a line with or without its end; returns an event's data once the blank line behind it has come.
    pub fn push(&mut self, line: &[u8]) -> Option<String> {
        let line = String::from_utf8_lossy(line);
        let line = line.trim_end_matches(['\n', '\r']);
        if line.is_empty() {
            return self.data.take();
        }
        // Comments, names and ids say nothing here.
        let value = line.strip_prefix("data:")?;
        let value = value.strip_prefix(' ').unwrap_or(value);
        match &mut self.data {
            Some(data) => data.extend(["\n", value]),
            None => self.data = Some(value.to_owned()),
        }
        None
    }

    /// Bytes of the event that has begun.
    pub fn pending(&self) -> usize {
        self.data.as_ref().map_or(0, String::len)
    }

    /// What was begun when the stream ended; some servers leave the last blank line out.
    pub fn rest(&mut self) -> Option<String> {
        self.data.take()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(text: &str) -> Vec<String> {
        let mut events = Events::default();
        let mut found: Vec<String> =
            text.split_inclusive('\n').filter_map(|line| events.push(line.as_bytes())).collect();
        found.extend(events.rest());
        found
    }

    #[test]
    fn data_is_what_counts() {
        let text = ": keepalive 1/2\n\nevent: x\nid: 3\ndata: {\"a\":1}\n\ndata:b\r\ndata:  c\r\n\r\n\n\ndata: [DONE]";
        assert_eq!(events(text), ["{\"a\":1}", "b\n c", "[DONE]"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(lines in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..20)) {
            let mut events = Events::default();
            for line in lines {
                let _ = events.push(&line);
            }
            let _ = events.rest();
        }
    }
}
