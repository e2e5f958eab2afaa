//! A sink that cannot hurt anybody but its own request.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::request::{GenerationError, GenerationEvent, GenerationSink, Summary};

/// Passes events on until the last one, or until the sink panics.
pub(super) struct Listener {
    /// `None` once there is nothing more to say, or nobody to say it to.
    sink: Option<Box<dyn GenerationSink>>,
}

impl Listener {
    pub(super) fn new(sink: Box<dyn GenerationSink>) -> Self {
        Self { sink: Some(sink) }
    }

    /// Whether the request is pointless by now.
    pub(super) fn is_gone(&mut self) -> bool {
        let Some(sink) = &self.sink else { return true };
        match catch_unwind(AssertUnwindSafe(|| sink.is_gone())) {
            Ok(gone) => gone,
            Err(_) => {
                self.close();
                true
            }
        }
    }

    pub(super) fn send(&mut self, event: GenerationEvent) {
        let Some(sink) = &mut self.sink else { return };
        if catch_unwind(AssertUnwindSafe(|| sink.send(event))).is_err() {
            self.close();
        }
    }

    /// The last event.
    pub(super) fn end(&mut self, end: Result<Summary, GenerationError>) {
        self.send(match end {
            Ok(summary) => GenerationEvent::Finished(summary),
            Err(error) => GenerationEvent::Failed(error),
        });
        self.close();
    }

    fn close(&mut self) {
        let sink = self.sink.take();
        // Dropping runs code of the sink's, too.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(sink)));
    }
}

impl Drop for Listener {
    /// Whoever listens hears an end, whatever happened.
    fn drop(&mut self) {
        if self.sink.is_some() {
            self.end(Err(GenerationError::Dead));
        }
    }
}
