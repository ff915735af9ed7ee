# What a script meets in a recorded dry run: bash reads this first (BASH_ENV).
#
# A command that no file of PATH has comes to command_not_found_handle, and one that is written with
# a slash to a function of that name, which the trap makes before bash looks for it. Nothing here
# may change what the script sees: $?, IFS, BASH_REMATCH and its options.

exec {BASH_XTRACEFD}> /dev/null
__nest_bin=$NEST_DRY_RUN/bin
[[ ${NEST_DRY_RUN_PATH+set} ]] || export NEST_DRY_RUN_PATH=$PATH

[[ ! ${SLURM_JOB_ID-} ]] || export SLURMD_NODENAME=${SLURMD_NODENAME-node1}

# What MPI tells a rank of the launcher around this shell: of its first one.
if [[ ${NEST_DRY_RUN_AROUND-} == *[\"/]@(mpirun|mpiexec|mpiexec.hydra|orterun|prterun)\"* ]]; then
  export OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0
  for __nest_word in -n --n -np --np; do
    __nest_rest=${NEST_DRY_RUN_AROUND#*"\"$__nest_word\", \""}
    [[ $__nest_rest != [1-9]* ]] || OMPI_COMM_WORLD_SIZE=${__nest_rest%%[!0-9]*}
  done
fi

# Write a name and its line down. Lists: skipped, absent, unset.
__nest_note() {
  printf '%s\0%s\0' "$2" "${NEST_DRY_RUN_AT-}" >> "$NEST_DRY_RUN/$1"
}

command_not_found_handle() {
  case " $*" in
    *[\ /]python\ ?* | *[\ /]python3\ ?* | *[\ /]torchrun\ ?*) __nest_call "$@" ;;
    *) __nest_note skipped "$1" ;;
  esac
}

__nest_call() {
  "$__nest_bin/.recorder" "$@"
}

__nest_cd() {
  builtin "$@" 2> /dev/null || __nest_note absent "${!#}"
}

__nest_exec() {
  while [[ ${1-} == -* ]]; do
    [[ $1 == -a ]] && shift
    shift
  done
  if [[ ${1-} == */* ]]; then __nest_call "$@"; else builtin command "$@"; fi
  exit
}

# Run a program of PATH; `builtin command` ends a script of `set -e` where it may fail, too.
__nest_run() {
  (builtin exec "$@")
}

cd() { __nest_cd cd "$@"; }
pushd() { __nest_cd pushd "$@" > /dev/null; }
which() { PATH=$__nest_bin:$NEST_DRY_RUN_PATH builtin type -P "$@"; }
command() {
  case ${1-} in
    -v | -V) PATH=$__nest_bin:$NEST_DRY_RUN_PATH builtin command "$@" ;;
    -p) shift; command "$@" ;;
    */*) __nest_call "$@" ;;
    *)
      if [[ $(builtin type -at -- "${1-}") == *builtin* ]]; then
        builtin "$@"
      elif [[ -e $__nest_bin/${1-} ]]; then
        __nest_run "$@"
      else
        __nest_note skipped "$1"
      fi
      ;;
  esac
}
enable() { __nest_note skipped enable; }
ulimit() { :; }
trap() { __nest_note skipped trap; } # no DEBUG trap watches what one on EXIT does
sleep() { :; }
xargs() { # of no words it trims
  local IFS=$' \t\n' __nest_words
  if (($#)); then
    cat > /dev/null
    __nest_note skipped xargs
  else
    read -rd '' -a __nest_words || :
    echo "${__nest_words[*]-}"
  fi
}
tail() {
  case " $* " in
    *" -f "* | *" -F "* | *" --follow"*) __nest_note skipped "tail -f" ;;
    *) __nest_run tail "$@" ;;
  esac
}

if [[ -e $NEST_DRY_RUN/open ]]; then # what is written would stay
  set -o noclobber
  sed() {
    case " $*" in
      *" -i"* | *" -"[nErsz]*i* | *" --in-place"*) __nest_note skipped "sed -i" ;;
      *) __nest_run sed "$@" ;;
    esac
  }
  find() {
    case " $*" in
      *" -delete"* | *" -exec"* | *" -ok"* | *" -fprint"* | *" -fls"*) __nest_note skipped find ;;
      *) __nest_run find "$@" ;;
    esac
  }
  sort() {
    case " $*" in
      *" -o"* | *" --output"*) __nest_note skipped "sort -o" ;;
      *) __nest_run sort "$@" ;;
    esac
  }
  kill() { __nest_note skipped kill; }
  tee() { cat; }
else # files that it makes on the way to its launch
  __nest_make() {
    (PATH=$NEST_DRY_RUN_PATH; builtin exec "$@" 2> /dev/null) || __nest_note skipped "$1"
  }
  mkdir() { __nest_make mkdir "$@"; }
  mktemp() { __nest_make mktemp "$@"; }
  touch() { __nest_make touch "$@"; }
  tee() { __nest_make tee "$@"; }
  cp() {
    local word
    for word; do
      [[ $word != -*[arR]* || $word == --[!ar]* ]] || { __nest_note skipped cp; return; }
    done
    __nest_make cp "$@"
  }
fi

# Cut the first word of $1 into __nest_word, the rest into __nest_rest; fail where that is not sure.
__nest_cut() {
  case $1 in
    '$('* | '"$('*) # $(which python), which may well be filled in twice
      __nest_word="${1%%)*})"
      [[ $1 != \"* ]] || __nest_word+=\"
      __nest_rest=${1#"$__nest_word"}
      [[ $__nest_word != *'('*'('* && ($__nest_rest == '' || $__nest_rest == [[:space:]]*) ]]
      return
      ;;
    \"*)
      __nest_word=${1#\"}
      __nest_word=\"${__nest_word%%\"*}\"
      __nest_rest=${1#"$__nest_word"}
      [[ $__nest_rest == '' || $__nest_rest == [[:space:]]* ]] || {
        __nest_word+=${__nest_rest%%[[:space:]]*}
        __nest_rest=${1#"$__nest_word"}
      }
      ;;
    *)
      __nest_word=${1%%[[:space:]]*}
      __nest_rest=${1#"$__nest_word"}
      ;;
  esac
  [[ $__nest_word != *[!]A-Za-z0-9_.,/~+@%:=\"{}\$[*#!^?-]* ]]
}

# Whether the command $1 needs a function before bash looks for it: __nest_word says of what.
__nest_step() {
  __nest_rest=$1
  case $1 in *\'* | *'<<'*) ;; *\$*) __nest_unset "$1" ;; esac
  case $1 in *[/\$]* | exec* | source* | .*) ;; *) return 1 ;; esac
  local path=
  while [[ $__nest_rest == [A-Za-z_]*([A-Za-z0-9_])?(+)=* ]]; do
    [[ $__nest_rest != PATH=* ]] || path=1
    __nest_name=${__nest_rest%%=*}
    case ${__nest_rest#*=} in
      \"*) __nest_cut "${__nest_rest#*=}" || return 1 ;;
      *) __nest_cut "$__nest_rest" || return 1 ;;
    esac
    __nest_rest=${__nest_rest#"${__nest_rest%%[![:space:]]*}"}
    [[ $__nest_rest ]] || return 1
  done
  __nest_cut "$__nest_rest" || return 1
  case $__nest_word in
    source | .)
      __nest_word="source ${__nest_rest%% [0-9&]>*}"
      __nest_word=${__nest_word%% >*}
      [[ $__nest_word != *[\<\`\;\|]* && $__nest_word != *'$(('* ]]
      ;;
    exec)
      [[ $__nest_rest == [[:space:]][!\<\>0-9\&{]* ]] || __nest_word='exec /dev/null'
      ;;
    *[/\$]*) ;;
    *) [[ $path ]] && __nest_word="path $__nest_word" ;;
  esac
}

# Make the function that stands for a command, or take it away again.
__nest_define() {
  case ${1-} in
    source)
      unset -f source .
      [[ ! ${2-} || -e ${2-} ]] || {
        source() { __nest_note absent "$1"; }
        .() { __nest_note absent "$1"; }
      }
      ;;
    exec)
      unset -f exec
      [[ ${2-} ]] || exec() { __nest_exec "$@"; }
      ;;
    path) [[ ! -e $__nest_bin/$2 ]] || eval "$2() { __nest_call $2 \"\$@\"; }" ;;
    "$NEST_DRY_RUN"/*) ;;
    */*) [[ $1 == *[!A-Za-z0-9_./+@%:-]* ]] || eval "$1() { __nest_call $1 \"\$@\"; }" ;;
  esac
}

# Write down the variables of a command that nothing sets.
__nest_unset() {
  local __nest_text=$1 __nest_name __nest_after
  while [[ $__nest_text == *\$* ]]; do
    __nest_text=${__nest_text#*\$}
    __nest_name=${__nest_text#\{}
    __nest_after=${__nest_name#"${__nest_name%%[!A-Za-z0-9_]*}"}
    __nest_name=${__nest_name%"$__nest_after"}
    [[ $__nest_text != \{* || $__nest_after == \}* ]] || continue
    case $__nest_name in '' | [0-9]* | _ | *__nest*) continue ;; esac
    [[ ${!__nest_name+set} ]] || __nest_note unset "$__nest_name"
  done
}

# Have __nest_target look at the files that $1 writes to.
__nest_targets() {
  local __nest_text=$1
  while [[ $__nest_text == *\>* ]]; do
    __nest_text=${__nest_text#*>}
    __nest_text=${__nest_text#[>|]}
    [[ $__nest_text == ' '[!\&\(]* ]] && __nest_file "${__nest_text# }" || continue
    __nest_todo+="__nest_target ${__nest_word@Q} $__nest_word;"
  done
}

# Cut the name of a file that $1 begins with into __nest_word; fail where it is no plain word and
# must not be filled in twice.
__nest_file() {
  local __nest_at __nest_quoted=0 __nest_depth=0 __nest_ticks=0
  for ((__nest_at = 0; __nest_at < ${#1}; __nest_at++)); do
    case ${1:__nest_at:1} in
      \\) ((__nest_at += 1)) ;;
      \") ((__nest_quoted ^= 1)) ;;
      \`) ((__nest_ticks ^= 1)) ;;
      \')
        ((__nest_quoted && !__nest_depth)) || {
          __nest_word=${1:__nest_at + 1}
          [[ $__nest_word == *\'* ]] || return 1
          __nest_word=${__nest_word%%\'*}
          ((__nest_at += ${#__nest_word} + 1))
        }
        ;;
      \()
        [[ ${1:__nest_at - 1:3} == \$\([!\(] ]] || return 1
        ((__nest_depth += 1))
        ;;
      [[:space:]\;\&\|\<\>\)])
        ((__nest_quoted || __nest_depth || __nest_ticks)) || break
        [[ ${1:__nest_at:1} != \) ]] || ((__nest_depth -= 1))
        ;;
    esac
  done
  __nest_word=${1:0:__nest_at}
  ((__nest_at && !__nest_quoted && !__nest_depth && !__nest_ticks))
}

# Let the command write to /dev/null in the place of $1, which is $2, where it cannot or may not.
__nest_target() {
  [[ ${2-} != /dev/* ]] || return 0
  [[ -e $NEST_DRY_RUN/open ]] || ! { : >> "${2-}"; } 2> /dev/null || return 0
  __nest_instead=${__nest_instead/">| $1"/"> $1"}
  __nest_instead=${__nest_instead/"> $1"/"> /dev/null"}
  __nest_skip=1
}

# Before a command: its line, its file and its text. __nest_todo is to be done first.
__nest_before() {
  [[ $2 != "$NEST_DRY_RUN/shell.bash" ]] || return 1
  ! shopt -q extdebug || { shopt -u extdebug; set -o functrace; }
  [[ $PATH == "$__nest_bin" ]] || PATH=$__nest_bin
  export NEST_DRY_RUN_AT=$2:$1
  [[ ! ${__nest_known[$3]-} ]] || return 1
  __nest_todo= __nest_instead=$3
  [[ $3 != *\>* ]] || __nest_targets "$3"
  if __nest_step "$3"; then __nest_todo+="__nest_define $__nest_word"; fi
  [[ $__nest_todo ]] || __nest_known[$3]=1
  [[ $__nest_todo ]]
}

# A trap that fails skips its command, under extdebug alone, which goes with functrace.
__nest_skipped() {
  __nest_skip=
  shopt -s extdebug
}

declare -A __nest_known
__nest_skip=
FUNCNEST=1000
set -o functrace
builtin trap '[[ ${FUNCNAME[900]-} ]] || { __nest_before "$LINENO" "${BASH_SOURCE-}" "$BASH_COMMAND" && eval "$__nest_todo"; } || :; [[ ! $__nest_skip ]] || { eval "$__nest_instead" || :; ! __nest_skipped; }' DEBUG
