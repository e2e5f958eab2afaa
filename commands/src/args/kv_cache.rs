//! The key-value cache: its size, its packing, how fast it is filled.

use std::num::ParseIntError;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use mlx_bun::generate::step::KvQuantization;

use super::{Warnings, range};
use crate::error::Complaint;

/// Values that share a scale, unless asked otherwise (mlx-lm's default).
const GROUP_SIZE: u32 = 64;
/// Positions before `--kv-bits` packs anything, unless asked otherwise (mlx-lm's default).
const QUANTIZED_START: i32 = 5000;

/// Flags of the key-value cache.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Key-value cache")]
pub struct KvCacheArgs {
    #[arg(long, value_name = "N", help = range::MAX_KV_SIZE.help("Keep at most this many positions: the first 4 and the most recent ones"), value_parser = range::MAX_KV_SIZE.parser(), hide_short_help = true)]
    pub max_kv_size: Option<i32>,

    /// Pack the cache to 4 or 8 bits from the first token on, or not
    ///
    /// The short form of `--kv-bits N --quantized-kv-start 0`.
    #[arg(long, value_name = "off|4|8", value_parser = ["off", "4", "8"])]
    pub kv_quant: Option<String>,

    /// Pack the cache to this many bits a value
    #[arg(long, value_name = "BITS", value_parser = integers::<u8, 6>(["2", "3", "4", "5", "6", "8"]), hide_short_help = true)]
    pub kv_bits: Option<u8>,

    /// Values that share a scale in the packed cache [default: 64]
    #[arg(long, value_name = "N", value_parser = integers::<u32, 3>(["32", "64", "128"]), hide_short_help = true)]
    pub kv_group_size: Option<u32>,

    #[arg(long, value_name = "N", help = range::QUANTIZED_KV_START.help("Positions to collect before the cache is packed [default: 5000 with --kv-bits, 0 with --kv-quant]"), value_parser = range::QUANTIZED_KV_START.parser(), hide_short_help = true)]
    pub quantized_kv_start: Option<i32>,

    #[arg(long, value_name = "N", help = range::PREFILL_STEP_SIZE.help("Prompt tokens to process at a time; smaller takes less memory [default: 2048; 512 with our CPU kernels]"), value_parser = range::PREFILL_STEP_SIZE.parser(), hide_short_help = true)]
    pub prefill_step_size: Option<usize>,
}

fn integers<T, const N: usize>(allowed: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = ParseIntError> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(allowed).try_map(|text| text.parse::<T>())
}

/// How the cache is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCache {
    /// Most positions a layer keeps.
    pub max_size: Option<i32>,
    /// Packing.
    pub quantization: Option<KvQuantization>,
    /// Whether `--kv-quant off` was given, which a packed cache from a file contradicts.
    pub unpacked: bool,
    /// Prompt tokens fed at a time; `None` for what suits the device.
    pub prefill_step_size: Option<usize>,
}

impl KvCacheArgs {
    /// What the flags say together.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub fn resolve(&self, warnings: &mut Warnings) -> Result<KvCache, Complaint> {
        let (bits, default_start) = match (self.kv_quant.as_deref(), self.kv_bits) {
            (None, bits) => (bits, QUANTIZED_START),
            (Some(quant), Some(bits)) if quant != bits.to_string() => {
                return Err(Complaint::usage(format!("`--kv-quant {quant}` contradicts `--kv-bits {bits}`"))
                    .hint("give one of the two"));
            }
            (Some("off"), _) => (None, QUANTIZED_START),
            (Some(quant), _) => (quant.parse().ok(), 0),
        };
        let quantization = bits.map(|bits| KvQuantization {
            bits,
            group_size: self.kv_group_size.unwrap_or(GROUP_SIZE),
            start: self.quantized_kv_start.unwrap_or(default_start),
        });
        if quantization.is_some() && self.max_kv_size.is_some() {
            return Err(Complaint::usage("`--max-kv-size` cannot be combined with a packed cache")
                .hint("a cache that forgets cannot be packed yet: drop `--max-kv-size`, or `--kv-bits`/`--kv-quant`"));
        }
        let idle = [
            ("--kv-group-size", self.kv_group_size.is_some()),
            ("--quantized-kv-start", self.quantized_kv_start.is_some()),
        ];
        for (flag, _) in idle.iter().filter(|(_, given)| *given && quantization.is_none()) {
            warnings.push(format!("`{flag}` does nothing without `--kv-bits` or `--kv-quant`"));
        }
        Ok(KvCache {
            max_size: self.max_kv_size,
            quantization,
            unpacked: self.kv_quant.as_deref() == Some("off"),
            prefill_step_size: self.prefill_step_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: KvCacheArgs,
    }

    fn resolve(flags: &str) -> (Result<KvCache, Complaint>, Warnings) {
        let probe = Probe::try_parse_from(std::iter::once("x").chain(flags.split_whitespace())).unwrap();
        let mut warnings = Vec::new();
        (probe.args.resolve(&mut warnings), warnings)
    }

    fn quantization(flags: &str) -> Option<KvQuantization> {
        resolve(flags).0.unwrap().quantization
    }

    #[test]
    fn the_two_spellings_start_at_different_places() {
        assert_eq!(quantization(""), None);
        assert_eq!(quantization("--kv-quant off"), None);
        assert_eq!(quantization("--kv-quant 8"), Some(KvQuantization { bits: 8, group_size: 64, start: 0 }));
        assert_eq!(
            quantization("--kv-bits 3"),
            Some(KvQuantization { bits: 3, group_size: 64, start: 5000 })
        );
        assert_eq!(
            quantization("--kv-bits 4 --kv-group-size 32 --quantized-kv-start 7"),
            Some(KvQuantization { bits: 4, group_size: 32, start: 7 })
        );
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(resolve("--kv-quant off --kv-bits 4").0.is_err());
        assert!(resolve("--kv-quant 8 --kv-bits 4").0.is_err());
        assert!(resolve("--kv-quant 4 --kv-bits 4").0.is_ok());
    }

    #[test]
    fn p10_a_bounded_cache_cannot_be_packed_and_says_so_at_once() {
        assert!(resolve("--max-kv-size 512 --kv-bits 8").0.is_err());
    }

    #[test]
    fn flags_that_do_nothing_are_pointed_out() {
        let (_, warnings) = resolve("--kv-group-size 32");
        assert_eq!(warnings, ["`--kv-group-size` does nothing without `--kv-bits` or `--kv-quant`"]);
    }
}
