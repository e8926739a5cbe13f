/* GET and SET of pages on one connection of Redis, checksums and headers included.
 *
 * It talks as long as the server answers as a healthy one does: the page requested, nothing, or OK. At the first other
 * answer it leaves the connection, which must then be closed, and all pages without a result to page_calls.py, which
 * finds out what is wrong. So nothing here judges a server or tolerates errors: replies are compared with the few that
 * are expected, and no number from a server becomes a length.
 *
 * One thread at a time talks on a socket. Several may share the pages of a call, each with positions of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include "core.h"

enum { LEFT, DONE, OTHERWISE };           /* Of a page. OTHERWISE: not there to be read, or there already. */
enum { ENDED, UNEXPECTED, CLOSED, LATE }; /* Of a talk; or -errno. Only after ENDED may the connection be used on. */
enum {
    TEXT_BYTES = 64 << 10,
    REST_BYTES = 4 << 10,
    RECEIVED_AT_ONCE = 512 << 10, /* By one system call: what is hashed must still be in the processor's cache. */
    SENT_AT_ONCE = 256 << 10,     /* Bytes of small pages gathered for one system call. */
    TAIL_BYTES = 256,             /* Received behind a page: its line end, and the head of the next reply. */
    NAME_BYTES = 97,              /* Identity and page hash in hexadecimal, with a colon between them. */
    TIMER_SLACK = 50000000,       /* Nanoseconds by which a timer may be off: setting it costs a system call. */
    SHORTEST_TIMER = 1000000,
};

struct text {
    const char *at;
    int64_t length;
};
static const struct text LINE_END = {"\r\n", 2}, NO_PAGE = {"$-1\r\n", 5}, MISSING = {":0\r\n", 4},
                         STORED = {"+OK\r\n", 5};

/* What is sent and received around pages of one size. */
struct page_words {
    int64_t start[2];                            /* The first 16 bytes of every header. */
    struct text get_head, length_head, set_head; /* GET, STRLEN and SET up to the page's name in hexadecimal. */
    struct text set_tail, set_end;               /* SET between name and value, and behind the value. */
    struct text expected, there;                 /* The replies to GET, up to its value, and to STRLEN. */
};

struct talk_pages {
    int64_t *addresses; /* Of memory that receives the pages, or has those to be written. */
    int64_t *segments;
    int64_t segment_count;
    int64_t payload;
    const int64_t *keys;
    const struct page_words *words; /* Of pages of so many bytes. */
    int64_t *results;               /* LEFT before; receives what became of each page. */
    const int64_t *positions;       /* Which pages this talk is about. */
    int64_t position_count;
    int64_t socket;
    int64_t deadline; /* CLOCK_MONOTONIC in nanoseconds. */
    int64_t window;   /* Bytes of values that may be under way. */
    /* Of SET: */
    int64_t created;      /* Wall-clock milliseconds. */
    const char *question; /* PING of a word that nobody knows. It ends as its answer does. NULL: a GET. */
    int64_t question_length;
    int64_t answer_length;
};

/* A call on its way. A function that returns a bool of success has put the reason for its failure into `status`. */
struct talk {
    struct talk_pages call;
    struct memory memory;
    int64_t status;
    int64_t sent;       /* Of the positions. */
    int64_t most;       /* Pages under way. */
    int64_t timers[2];  /* When that of receiving and of sending was set. 0: not by this talk. */
    int64_t begin, end; /* What `rest` holds that no reply has used. */
    void *state;
    uint64_t header[HEADER_WORDS], right_header[HEADER_WORDS];
    struct iovec pieces[IOV_MAX];
    char rest[REST_BYTES], text[TEXT_BYTES];
    int64_t waiting[]; /* A word for each position. */
};

static bool fail(struct talk *talk, int64_t status)
{
    talk->status = status;
    return false;
}

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static struct iovec piece(const void *at, int64_t length) { return (struct iovec){(void *)at, (size_t)length}; }

/* -- the socket ---------------------------------------------------------------------------------------------------- */

/* Sends or receives some of `pieces`, *moved bytes, perhaps 0 of them; false after the deadline or an error. */
static bool move(struct talk *talk, bool is_send, struct iovec *pieces, int64_t count, int64_t *moved)
{
    const int64_t second = 1000000000;
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    int socket = (int)talk->call.socket;
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    int64_t now = clock.tv_sec * second + clock.tv_nsec, left = talk->call.deadline - now;
    if (left <= 0)
        return fail(talk, LATE);
    if (talk->timers[is_send] == 0 || now - talk->timers[is_send] > TIMER_SLACK) {
        left = left > SHORTEST_TIMER ? left : SHORTEST_TIMER;
        const struct timeval timer = {left / second, left % second / 1000};
        setsockopt(socket, SOL_SOCKET, is_send ? SO_SNDTIMEO : SO_RCVTIMEO, &timer, sizeof timer);
        talk->timers[is_send] = now;
    }
    *moved = is_send ? sendmsg(socket, &message, MSG_NOSIGNAL) : recvmsg(socket, &message, 0);
    if (*moved < 0) {
        *moved = 0;
        return errno == EAGAIN || errno == EINTR ? true : fail(talk, -errno);
    }
    return *moved > 0 || is_send ? true : fail(talk, CLOSED);
}

/* Sends all of the first `count` pieces, which are used up. */
static bool send_pieces(struct talk *talk, int64_t count)
{
    struct iovec *next = talk->pieces, *end = next + count;
    int64_t sent;
    while (next < end) {
        if (!move(talk, true, next, end - next, &sent))
            return false;
        for (; next < end && sent >= (int64_t)next->iov_len; next++)
            sent -= (int64_t)next->iov_len;
        if (next < end)
            *next = piece((char *)next->iov_base + sent, (int64_t)next->iov_len - sent);
    }
    return true;
}

/* Fills the first `count` pieces with what has arrived; how many bytes, or 0 after a failure. */
static int64_t receive(struct talk *talk, int64_t count)
{
    int64_t received = 0;
    while (received == 0 && move(talk, false, talk->pieces, count, &received))
        ;
    return received;
}

/* -- requests and replies ------------------------------------------------------------------------------------------ */

static char *append(char *at, struct text text)
{
    memcpy(at, text.at, (size_t)text.length);
    return at + text.length;
}

/* Writes `head`, the name of a page and `tail` at `at`; the end of them. */
static char *append_request(const struct talk *talk, char *at, struct text head, int64_t page, struct text tail)
{
    const uint8_t *key = (const uint8_t *)(talk->call.keys + page * KEY_WORDS);
    at = append(at, head);
    for (int byte = 0; byte < 8 * KEY_WORDS; byte++) {
        if (byte == 8 * IDENTITY_WORDS)
            *at++ = ':';
        *at++ = "0123456789abcdef"[key[byte] >> 4];
        *at++ = "0123456789abcdef"[key[byte] & 15];
    }
    return append(at, tail);
}

/* Sends as many requests as there is room for, up to position `until`; behind the last of all positions `question`. */
static bool ask(struct talk *talk, struct text head, int64_t until, struct text question)
{
    const struct talk_pages *call = &talk->call;
    int64_t longest = head.length + NAME_BYTES + LINE_END.length + question.length;
    char *end = talk->text;
    while (talk->sent < least(until, call->position_count) && end - talk->text + longest <= TEXT_BYTES)
        end = append_request(talk, end, head, call->positions[talk->sent++], LINE_END);
    if (talk->sent == call->position_count)
        end = append(end, question);
    talk->pieces[0] = piece(talk->text, end - talk->text);
    return send_pieces(talk, end > talk->text);
}

/* Takes the next reply, which must be `one` or `other`: whether it is `one`, or -1 after a failure. */
static int take(struct talk *talk, struct text one, struct text other)
{
    const struct text replies[] = {other, one};
    for (;;) {
        int64_t come = talk->end - talk->begin;
        bool may_come = false;
        for (int which = 1; which >= 0; which--) {
            int64_t length = replies[which].length;
            if (memcmp(talk->rest + talk->begin, replies[which].at, (size_t)least(come, length)) != 0)
                continue;
            if (come >= length) {
                talk->begin += length;
                return which;
            }
            may_come = true;
        }
        memmove(talk->rest, talk->rest + talk->begin, (size_t)come);
        talk->pieces[0] = piece(talk->rest + come, REST_BYTES - come);
        talk->begin = 0;
        talk->end = come;
        if (!may_come)
            fail(talk, UNEXPECTED);
        else
            talk->end += receive(talk, 1);
        if (talk->end == come)
            return -1;
    }
}

/* -- GET ----------------------------------------------------------------------------------------------------------- */

/* Return what follows the first `offset` bytes of a segment of a page, or of its header if `segment` is -1. */
static struct iovec piece_of(struct talk *talk, int64_t page, int64_t segment, int64_t offset)
{
    const struct memory *memory = &talk->memory;
    if (segment < 0)
        return piece((char *)talk->header + offset, HEADER_BYTES - offset);
    const char *begin = (const char *)memory->addresses[page * memory->segment_count + segment];
    return piece(begin + offset, memory->segments[segment] - offset);
}

/* Receives and hashes a page, whose length was read. What follows it is in `rest`. */
static bool receive_page(struct talk *talk, int64_t page)
{
    const struct memory *memory = &talk->memory;
    int64_t missing = HEADER_BYTES + memory->payload;
    int64_t segment = -1, offset = 0; /* Where the next byte goes. */
    of_others.reset(talk->state);
    while (missing > 0) {
        int64_t count = 0, wanted = 0, moved;
        /* One piece is left for what comes behind. */
        for (int64_t at = segment; at < memory->segment_count; at++) {
            if (wanted == RECEIVED_AT_ONCE || count == IOV_MAX - 1)
                break;
            struct iovec next = piece_of(talk, page, at, at == segment ? offset : 0);
            next.iov_len = (size_t)least((int64_t)next.iov_len, RECEIVED_AT_ONCE - wanted);
            wanted += (int64_t)next.iov_len;
            talk->pieces[count++] = next;
        }
        if (talk->begin < talk->end) {
            /* This came behind the page before. */
            moved = least(talk->end - talk->begin, (int64_t)talk->pieces[0].iov_len);
            memcpy(talk->pieces[0].iov_base, talk->rest + talk->begin, (size_t)moved);
            talk->begin += moved;
        } else {
            talk->pieces[count] = piece(talk->rest, TAIL_BYTES);
            moved = receive(talk, count + (wanted == missing));
            if (moved == 0)
                return false;
            talk->begin = 0;
            talk->end = moved - least(moved, wanted);
            moved -= talk->end;
        }
        missing -= moved;
        while (moved > 0) {
            struct iovec next = piece_of(talk, page, segment, offset);
            int64_t length = least(moved, (int64_t)next.iov_len);
            bool is_full = length == (int64_t)next.iov_len;
            if (segment >= 0)
                of_others.update(talk->state, next.iov_base, (size_t)length);
            moved -= length;
            offset = is_full ? 0 : offset + length;
            segment += is_full;
        }
    }
    return true;
}

/* Returns whether what was received is this page. */
static bool is_page(struct talk *talk, int64_t page)
{
    uint64_t of_header[2];
    write_sealed(talk->right_header, talk->call.words->start, talk->call.keys + page * KEY_WORDS,
                 talk->memory.payload, of_others.digest(talk->state));
    hash_of_header(talk->header, CHECKED_BYTES, of_header);
    return memcmp(talk->header, talk->right_header, SEALED_BYTES) == 0 &&
           memcmp(talk->header + HEADER_CHECKSUM_WORD, of_header, sizeof of_header) == 0;
}

static bool get(struct talk *talk)
{
    const struct page_words *words = talk->call.words;
    for (int64_t number = 0; number < talk->call.position_count; number++) {
        int64_t page = talk->call.positions[number];
        if (talk->sent - number <= talk->most / 2 &&
            !ask(talk, words->get_head, number + talk->most, (struct text){"", 0}))
            return false;
        int is_there = take(talk, words->expected, NO_PAGE);
        if (is_there < 0 || (is_there && (!receive_page(talk, page) || take(talk, LINE_END, LINE_END) < 0)))
            return false;
        if (is_there && !is_page(talk, page))
            return fail(talk, UNEXPECTED);
        talk->call.results[page] = is_there ? DONE : OTHERWISE;
    }
    return talk->begin == talk->end || fail(talk, UNEXPECTED);
}

/* -- SET ----------------------------------------------------------------------------------------------------------- */

/* Sends pages of `waiting`, as many as one system call takes, up to `until`; behind the last of all `question`. */
static bool send_pages(struct talk *talk, int64_t until, int64_t absent, struct text question)
{
    const struct memory *memory = &talk->memory;
    const struct page_words *words = talk->call.words;
    int64_t longest = words->set_head.length + NAME_BYTES + words->set_tail.length + HEADER_BYTES;
    int64_t count = 0, total = 0;
    char *end = talk->text;
    /* A page has two pieces besides its segments; one is left for the question. */
    while (talk->sent < least(until, absent) && total < SENT_AT_ONCE && end - talk->text + longest <= TEXT_BYTES &&
           count + memory->segment_count + 3 <= IOV_MAX) {
        int64_t page = talk->waiting[talk->sent++];
        char *begin = end;
        write_sealed(talk->header, words->start, talk->call.keys + page * KEY_WORDS, memory->payload,
                     checksum_of(talk->state, memory, page));
        finish_header(talk->header, talk->call.created);
        end = append_request(talk, end, words->set_head, page, words->set_tail);
        end = append(end, (struct text){(const char *)talk->header, HEADER_BYTES});
        talk->pieces[count++] = piece(begin, end - begin);
        for (int64_t segment = 0; segment < memory->segment_count; segment++)
            talk->pieces[count++] = piece_of(talk, page, segment, 0);
        talk->pieces[count++] = piece(words->set_end.at, words->set_end.length);
        total += HEADER_BYTES + memory->payload;
    }
    if (count == 0)
        return fail(talk, UNEXPECTED); /* A page of more pieces or longer words than there is room for. */
    if (talk->sent == absent)
        talk->pieces[count++] = piece(question.at, question.length);
    return send_pieces(talk, count);
}

/* Writes the pages that are missing. `question` ends both rounds: if its answer follows the last reply, there were no
 * extra replies. */
static bool set(struct talk *talk)
{
    const struct talk_pages *call = &talk->call;
    struct text question = {call->question, call->question_length};
    struct text answer = {question.at + question.length - call->answer_length, call->answer_length};
    const int64_t *positions = call->positions;
    int64_t count = call->position_count, absent = 0;
    /* The payload of pages that are there need not be sent. */
    for (int64_t number = 0; number < count; number++) {
        if (number == talk->sent && !ask(talk, talk->call.words->length_head, count, question))
            return false;
        talk->waiting[number] = take(talk, talk->call.words->there, MISSING);
        if (talk->waiting[number] < 0)
            return false;
    }
    if (take(talk, answer, answer) < 0)
        return false;
    for (int64_t number = 0; number < count; number++) {
        if (talk->waiting[number])
            talk->call.results[positions[number]] = OTHERWISE;
        else
            talk->waiting[absent++] = positions[number];
    }
    talk->sent = 0;
    for (int64_t number = 0; number < absent; number++) {
        while (talk->sent < absent && talk->sent - number <= talk->most / 2)
            if (!send_pages(talk, number + talk->most, absent, question))
                return false;
        int is_stored = take(talk, STORED, NO_PAGE);
        if (is_stored < 0)
            return false;
        if (!is_stored)
            talk->waiting[number] = -1; /* It came in between: page_calls.py looks at it. */
    }
    if (absent > 0 && take(talk, answer, answer) < 0)
        return false;
    if (talk->begin != talk->end)
        return fail(talk, UNEXPECTED);
    for (int64_t number = 0; number < absent; number++)
        if (talk->waiting[number] >= 0)
            talk->call.results[talk->waiting[number]] = DONE;
    return true;
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

/* GETs the pages, one after the other, or STRLEN, then SET NX of what is not there; how it ended. At least one page.
 * What `results` calls DONE or OTHERWISE holds, however it ended; the memory of other pages of a GET may hold anything. */
PUBLIC int64_t hicache_talk_pages(const struct talk_pages *call)
{
    struct talk *talk = malloc(sizeof *talk + 8 * (size_t)call->position_count);
    void *state = of_others.new_state();
    int64_t size = HEADER_BYTES + call->payload, status = -ENOMEM;
    if (talk != NULL && state != NULL) {
        memset(talk, 0, offsetof(struct talk, header));
        talk->call = *call;
        talk->memory = (struct memory){call->addresses, call->segments, call->segment_count, call->payload};
        talk->state = state;
        /* However large pages are, another one is in flight while one is received or answered. */
        talk->most = call->window / size > 2 ? call->window / size : 2;
        status = (call->question == NULL ? get(talk) : set(talk)) ? ENDED : talk->status;
    }
    of_others.free_state(state);
    free(talk);
    return status;
}
