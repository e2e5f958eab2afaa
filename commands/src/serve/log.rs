//! One line for each request on standard error: never its text.

use std::io;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clock::timestamp;
use serde_json::json;

use super::metrics::Metrics;
use super::reply::Usage;
use crate::printer::Printer;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Words
    Text,
    /// A JSON object a line
    Json,
}

/// Lines that wait for standard error.
const BACKLOG: usize = 1024;

/// Where lines go: to a thread of their own, so that nobody waits where standard error is not read. Clones share it.
#[derive(Clone)]
pub struct Log {
    format: LogFormat,
    lines: SyncSender<Line>,
    lost: Arc<AtomicU64>,
}

enum Line {
    Text(String),
    /// Everything before it is written.
    Flushed(Sender<()>),
}

impl Log {
    /// To standard error, unless the printer is quiet.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(printer: Printer, format: LogFormat) -> io::Result<Self> {
        let (log, lines) = Self::unwritten(format, BACKLOG);
        let lost = Arc::clone(&log.lost);
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || write(&printer, format, &lines, &lost))?;
        Ok(log)
    }

    /// A log whose lines go to the receiver.
    fn unwritten(format: LogFormat, backlog: usize) -> (Self, Receiver<Line>) {
        let (lines, receiver) = sync_channel(backlog);
        (Self { format, lines, lost: Arc::default() }, receiver)
    }

    /// Something that happened to the server.
    pub fn event(&self, event: &str, text: &str) {
        self.line(event_line(self.format, event, text));
    }

    /// Waits until all lines so far are written, but not for ever.
    pub fn flush(&self, patience: Duration) {
        let (done, flushed) = channel();
        let end = Instant::now() + patience;
        let mut marker = Line::Flushed(done);
        while let Err(TrySendError::Full(back)) = self.lines.try_send(marker) {
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
            marker = back;
        }
        let _ = flushed.recv_timeout(end.saturating_duration_since(Instant::now()));
    }

    fn line(&self, line: String) {
        if self.lines.try_send(Line::Text(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn event_line(format: LogFormat, event: &str, text: &str) -> String {
    match format {
        LogFormat::Text => text.to_owned(),
        LogFormat::Json => json!({"time": timestamp(), "event": event, "message": text}).to_string(),
    }
}

/// Writes lines until the last log goes. What was dropped meanwhile is told before the next one.
fn write(printer: &Printer, format: LogFormat, lines: &Receiver<Line>, lost: &AtomicU64) {
    for line in lines {
        match line {
            Line::Text(line) => {
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    let told = format!("{lost} lines were lost: nobody read them in time");
                    printer.note(&event_line(format, "lost", &told));
                }
                printer.note(&line);
            }
            Line::Flushed(done) => _ = done.send(()),
        }
    }
}

/// What is known of a request. Written when the last copy goes: with the end of a stream, not with its beginning.
pub struct RequestLog {
    log: Log,
    metrics: Arc<Metrics>,
    id: String,
    method: String,
    route: String,
    start: Instant,
    status: AtomicU16,
    /// What a stream failed with after its beginning went out.
    failure: AtomicU16,
    first_token: OnceLock<f64>,
    usage: OnceLock<Usage>,
    /// Replies whose end was not sent.
    open: AtomicUsize,
}

impl RequestLog {
    /// A request that has just come in.
    pub fn new(log: Log, metrics: Arc<Metrics>, id: String, method: String, route: String) -> Arc<Self> {
        Arc::new(Self {
            log,
            metrics,
            id,
            method,
            route,
            start: Instant::now(),
            status: AtomicU16::new(0),
            failure: AtomicU16::new(0),
            first_token: OnceLock::new(),
            usage: OnceLock::new(),
            open: AtomicUsize::new(0),
        })
    }

    /// The request's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The status that was sent.
    pub fn status(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    /// A stream has begun, and ends with [`RequestLog::finished`] unless the client goes.
    pub fn streaming(&self) {
        self.open.store(1, Ordering::Relaxed);
    }

    /// The first text was sent.
    pub fn first_token(&self) {
        let _ = self.first_token.set(self.start.elapsed().as_secs_f64());
    }

    /// A stream that has begun failed; the status that was sent stays what it was.
    pub fn failed(&self, status: u16) {
        self.failure.store(status, Ordering::Relaxed);
    }

    /// Tokens of a stream that the client left.
    pub fn left(&self, usage: Usage) {
        let _ = self.usage.set(usage);
    }

    /// All was sent.
    pub fn finished(&self, usage: Usage) {
        let _ = self.usage.set(usage);
        self.open.store(0, Ordering::Relaxed);
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let seconds = self.start.elapsed().as_secs_f64();
        let sent = self.status.load(Ordering::Relaxed);
        // 499: the client went before the end (nginx's number for it).
        let status = if sent == 0 || self.open.load(Ordering::Relaxed) > 0 { 499 } else { sent };
        let usage = self.usage.get().copied();
        let first_token = self.first_token.get().copied();
        self.metrics.request(&self.route, status, seconds, first_token, usage);
        match self.log.format {
            LogFormat::Text => self.log.line(self.text(status, seconds, first_token, usage)),
            LogFormat::Json => {
                let mut line = json!({
                    "time": timestamp(), "event": "request", "id": self.id, "method": self.method,
                    "route": self.route, "status": status, "seconds": rounded(seconds),
                });
                if let Some(failure) = self.failure() {
                    line["failed"] = json!(failure);
                }
                if let Some(first_token) = first_token {
                    line["first_token_seconds"] = json!(rounded(first_token));
                }
                if let Some(usage) = usage {
                    line["prompt_tokens"] = json!(usage.prompt);
                    line["cached_tokens"] = json!(usage.cached);
                    line["completion_tokens"] = json!(usage.completion);
                }
                self.log.line(line.to_string());
            }
        }
    }
}

impl RequestLog {
    fn failure(&self) -> Option<u16> {
        Some(self.failure.load(Ordering::Relaxed)).filter(|status| *status > 0)
    }

    fn text(&self, status: u16, seconds: f64, first_token: Option<f64>, usage: Option<Usage>) -> String {
        let mut line =
            format!("{} {} {} {status} {seconds:.3}s id={}", timestamp(), self.method, self.route, self.id);
        if let Some(failure) = self.failure() {
            line.push_str(&format!(" failed={failure}"));
        }
        if let Some(first_token) = first_token {
            line.push_str(&format!(" first-token={first_token:.3}s"));
        }
        if let Some(usage) = usage {
            let Usage { prompt, cached, completion, .. } = usage;
            line.push_str(&format!(" prompt={prompt} cached={cached} completion={completion}"));
        }
        line
    }
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// Times without a calendar library.
mod clock {
    use std::time::{SystemTime, UNIX_EPOCH};

    /// Now, as RFC 3339 with milliseconds, in UTC.
    pub fn timestamp() -> String {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format(since.as_secs(), since.subsec_millis())
    }

    /// The civil date of a day since 1970 (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
    pub fn format(seconds: u64, millis: u32) -> String {
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::printer::Verbosity;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn lines_that_nobody_reads_are_dropped_and_counted() {
        let (log, lines) = Log::unwritten(LogFormat::Text, 2);
        for line in ["one", "two", "three", "four", "five"] {
            log.event("x", line);
        }
        log.flush(Duration::from_millis(10));
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let lost = Arc::clone(&log.lost);
        drop(log);
        write(&printer, LogFormat::Text, &lines, &lost);
        assert_eq!(captured.err(), "3 lines were lost: nobody read them in time\none\ntwo\n");
    }

    fn request(log: &Log) -> Arc<RequestLog> {
        let [id, method, route] = ["r1", "POST", "/v1/x"].map(str::to_owned);
        RequestLog::new(log.clone(), Arc::default(), id, method, route)
    }

    #[test]
    fn a_stream_that_fails_keeps_the_status_that_was_sent() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let (printer, captured) = Printer::captured(Verbosity::Default);
            let log = Log::new(printer, format).unwrap();
            let request = request(&log);
            request.status(200);
            request.streaming();
            request.failed(503);
            request.finished(Usage { prompt: 3, completion: 5, ..Usage::default() });
            drop(request);
            log.flush(PATIENCE);
            let words = match format {
                LogFormat::Text => ["/v1/x 200 ", " failed=503", "completion=5"],
                LogFormat::Json => ["\"status\":200", "\"failed\":503", "\"completion_tokens\":5"],
            };
            assert!(words.iter().all(|word| captured.err().contains(word)), "{}", captured.err());
        }
    }

    #[test]
    fn times_are_civil() {
        assert_eq!(clock::format(0, 7), "1970-01-01T00:00:00.007Z");
        assert_eq!(clock::format(951_782_399, 0), "2000-02-28T23:59:59.000Z");
        assert_eq!(clock::format(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(clock::format(1_798_761_599, 999), "2026-12-31T23:59:59.999Z");
    }

    #[test]
    fn a_request_is_one_line_when_it_is_over() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let log = Log::new(printer, LogFormat::Json).unwrap();
        let request = request(&log);
        request.status(200);
        request.streaming();
        let streaming = Arc::clone(&request);
        drop(request);
        log.flush(PATIENCE);
        assert_eq!(captured.err(), "");
        streaming.finished(Usage { prompt: 3, cached: 1, completion: 5, reasoning: 0 });
        drop(streaming);
        log.flush(PATIENCE);
        let line: Value = serde_json::from_str(&captured.err()).unwrap();
        assert_eq!(
            (&line["status"], &line["prompt_tokens"], &line["id"]),
            (&json!(200), &json!(3), &json!("r1"))
        );
    }

    #[test]
    fn a_client_that_goes_is_told_apart() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let log = Log::new(printer, LogFormat::Text).unwrap();
        let request = request(&log);
        request.status(200);
        request.streaming();
        drop(request);
        log.flush(PATIENCE);
        assert!(captured.err().contains("POST /v1/x 499 "), "{}", captured.err());
    }
}
