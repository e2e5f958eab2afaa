//! Any stop strings and any text in any pieces: what comes out is the text before the first match.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mlx_bun::generate::stop::StopMatcher;

fuzz_target!(|input: (Vec<String>, Vec<String>)| {
    let (stops, pieces) = input;
    let Ok(mut matcher) = StopMatcher::new(stops.clone()) else { return };
    let mut out = String::new();
    for piece in &pieces {
        out.push_str(&matcher.push(piece).text);
    }
    out.push_str(&matcher.finish().text);
    let whole = pieces.concat();
    let first = stops.iter().filter_map(|stop| whole.find(stop.as_str())).min();
    assert_eq!(out, whole[..first.unwrap_or(whole.len())]);
});
